"""Modules with torch.nn's names, signatures and state_dict; they hold parameters and no mathematics."""

from unrolled.nn.attention import MultiheadAttention as MultiheadAttention
from unrolled.nn.basic import Dropout as Dropout
from unrolled.nn.basic import Embedding as Embedding
from unrolled.nn.basic import Linear as Linear
from unrolled.nn.convert import convert as convert
from unrolled.nn.decoder_attention import AdditiveAttention as AdditiveAttention
from unrolled.nn.decoder_attention import MultiplicativeAttention as MultiplicativeAttention
from unrolled.nn.losses import CrossEntropyLoss as CrossEntropyLoss
from unrolled.nn.losses import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from unrolled.nn.losses import MSELoss as MSELoss
from unrolled.nn.norms import LayerNorm as LayerNorm
from unrolled.nn.norms import RMSNorm as RMSNorm
from unrolled.nn.positions import LearnedPositions as LearnedPositions
from unrolled.nn.positions import SinusoidalPositions as SinusoidalPositions
from unrolled.nn.recurrent import GRU as GRU
from unrolled.nn.recurrent import LSTM as LSTM
from unrolled.nn.recurrent import RNN as RNN
from unrolled.nn.recurrent import last as last
from unrolled.nn.recurrent_cells import GRUCell as GRUCell
from unrolled.nn.recurrent_cells import LSTMCell as LSTMCell
from unrolled.nn.recurrent_cells import RNNCell as RNNCell
from unrolled.nn.transformer import Transformer as Transformer
from unrolled.nn.transformer import TransformerDecoder as TransformerDecoder
from unrolled.nn.transformer import TransformerEncoder as TransformerEncoder
from unrolled.nn.transformer_layers import TransformerDecoderLayer as TransformerDecoderLayer
from unrolled.nn.transformer_layers import TransformerEncoderLayer as TransformerEncoderLayer
