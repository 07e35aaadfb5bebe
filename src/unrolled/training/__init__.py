"""The training loop with its checkpoints, schedules and guard; devices and processes through lightning-fabric."""

from unrolled.training.guard import NonFiniteError as NonFiniteError
from unrolled.training.start import fit as fit
from unrolled.training.task import Interrupted as Interrupted
from unrolled.training.task import Progress as Progress
from unrolled.training.task import RunResult as RunResult
from unrolled.training.task import Task as Task
