"""The configuration: defaults, mistakes by name, YAML."""

from __future__ import annotations

import pytest
import yaml

from unrolled.config import Config, ConfigError, option_names, parse_config, read_yaml, to_yaml

# Configuration


def test_config_round_trip():
    config = parse_config({"data": {"train": "a.csv"}, "training": {"learning_rate": "1e-4"}, "output_dir": "runs/a"})
    assert config.training.learning_rate == 1e-4
    assert parse_config(yaml.safe_load(to_yaml(config))) == config


def test_a_config_shows_what_its_task_has():
    for values, there, missing in (({}, "data", "memory"), ({"task": "memory"}, "memory", "data")):
        shown = yaml.safe_load(to_yaml(parse_config(values)))
        assert there in shown
        assert missing not in shown
        assert parse_config(shown) == parse_config(values)


def test_a_network_is_given_the_options_it_has():
    own = {
        "rnn": {"nonlinearity", "proj_size"},
        "lstm": {"proj_size", "peephole", "forget_bias"},
        "gru": {"reset"},
    }
    for model, names in own.items():
        found = parse_config({"model": {"model": model}}).model.arguments()
        assert set(found) & set.union(*own.values()) == names
        assert "zoneout_c" not in found
    attention = parse_config({"model": {"model": "attention", "encoder": "gru"}}).model.arguments()
    assert set(attention) & set.union(*own.values()) == own["gru"]
    assert {"encoder", "attention_size", "bidirectional"} < set(attention)
    assert not {"reading", "heads"} & set(attention)
    transformer = parse_config({"model": {"model": "transformer"}}).model
    assert transformer.reading == "mean"
    assert parse_config({"model": transformer.model_dump()}).model == transformer
    assert not set.union(*own.values()) & set(transformer.arguments())
    assert {"heads", "gated", "positions"} < set(transformer.arguments())
    assert not {"encoder", "embedding_size", "max_positions"} & set(transformer.arguments())
    pair = parse_config({"model": {"model": "lstm", "zoneout": 0.05, "zoneout_c": 0.5}}).model.arguments()
    assert pair["zoneout"] == (0.05, 0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": {"trian": "x"}}, "data: unknown key 'trian': did you mean train?"),
        ({"batch_size": 8}, "unknown key 'batch_size': did you mean training.batch_size?"),
        ({"model": {"learning_rate": 1}}, "did you mean training.learning_rate?"),
        ({"model": {"qqq": 1}}, "allowed are model, embedding_size"),
        ({"training": {"batch_size": -3}}, "training.batch_size: input should be greater than or equal to 1, found -3"),
        ({"training": {"learning_rate": float("nan")}}, "finite number, found nan"),
        ({"training": {"scheduler": "cos"}}, "should be 'none', 'cosine' or 'plateau', found 'cos'"),
        ({"data": {"valid": "v", "valid_fraction": 0.2}}, "valid_fraction = 0.2 has no effect with a valid file"),
        ({"data": {"valid": "v", "test": "t", "split_seed": 1}}, "split_seed = 1 has no effect"),
        ({"data": {"values_column": "v", "tokens": "words"}}, "tokens = 'words' has no effect with values_column"),
        ({"data": {"values_column": "v", "format": "csv"}}, "values_column needs JSONL files, found format = 'csv'"),
        (
            {"data": {"format": "pairs", "text_column": "t"}},
            "text_column = 't' has no effect in files without a header",
        ),
        ({"data": {"text_column": "label"}}, "the label and the input cannot both be in column 'label'"),
        ({"data": {"tokens": "bpe", "vocabulary_size": 99}}, "vocabulary_size must be >= 256"),
        ({"data": {"valid_fraction": 0.5, "test_fraction": 0.5}}, "must leave something to train on"),
        (
            {"model": {"model": "lstm", "nonlinearity": "relu"}},
            "nonlinearity = 'relu' has no effect with model = 'lstm'",
        ),
        ({"model": {"model": "rnn", "peephole": True}}, "peephole = True has no effect with model = 'rnn': remove it"),
        ({"model": {"model": "gru", "proj_size": 3}}, "proj_size = 3 has no effect with model = 'gru'"),
        ({"model": {"model": "gru", "forget_bias": 1}}, "forget_bias = 1.0 has no effect with model = 'gru'"),
        ({"model": {"model": "gru", "zoneout_c": 0.1}}, "zoneout_c = 0.1 has no effect with model = 'gru'"),
        ({"model": {"model": "lstm", "reset": "before"}}, "reset = 'before' has no effect with model = 'lstm'"),
        ({"model": {"model": "lstm", "proj_size": 128}}, "proj_size must be less than hidden_size = 128, found 128"),
        ({"model": {"zoneout": 1}}, "model.zoneout: input should be less than 1, found 1"),
        ({"model": {"recurrent_dropout": -0.1}}, "recurrent_dropout: input should be greater than or equal to 0"),
        (
            {"model": {"recurrent_init": "eye"}},
            "recurrent_init: input should be 'uniform' or 'orthogonal', found 'eye'",
        ),
        ({"model": {"bptt": -1}}, "bptt: input should be greater than or equal to 0, found -1"),
        ({"memory": {"length": 5}}, "memory.length = 5 has no effect with task = 'classify': remove it"),
        ({"lenght": 5}, "unknown key 'lenght': did you mean memory.length?"),
        ({"task": "memory", "memory": {"lenght": 5}}, "memory: unknown key 'lenght': did you mean length?"),
        ({"task": "memory", "memory": {"length": 1}}, "memory: length must be >= 2 with problem = 'adding', found 1"),
        ({"task": "memory", "data": {"train": "a.csv"}}, "data.train = 'a.csv' has no effect with task = 'memory'"),
        ({"task": "memory", "model": {"reading": "max"}}, "model.reading = 'max' has no effect with task = 'memory'"),
        (
            {"task": "memory", "training": {"label_smoothing": 0.1}},
            "training.label_smoothing = 0.1 has no effect with task = 'memory'",
        ),
        (
            {"task": "memory", "training": {"metric": "mcc"}},
            "training.metric must be accuracy or loss with task = 'memory', found 'mcc'",
        ),
        (
            {"model": {"model": "lstn"}},
            "model.model: input should be 'rnn', 'lstm', 'gru', 'attention' or 'transformer', found 'lstn'",
        ),
        (
            {"model": {"model": "transformer", "bidirectional": True}},
            "bidirectional = True has no effect with model = 'transformer': remove it",
        ),
        ({"model": {"model": "transformer", "embedding_size": 9}}, "embedding_size = 9 has no effect with model"),
        ({"model": {"model": "transformer", "zoneout": 0.1}}, "zoneout = 0.1 has no effect with model"),
        ({"model": {"model": "transformer", "encoder": "gru"}}, "encoder = 'gru' has no effect with model"),
        ({"model": {"model": "transformer", "heads": 3}}, "heads must divide hidden_size = 128, found 3"),
        (
            {"model": {"model": "transformer", "max_positions": 9}},
            "max_positions = 9 has no effect with positions = 'sinusoidal'",
        ),
        (
            {"model": {"model": "transformer", "positions": "rotary", "hidden_size": 12}},
            "positions = 'rotary' wants an even hidden_size / heads, found 3",
        ),
        ({"model": {"heads": 8}}, "heads = 8 has no effect with model = 'rnn': remove it"),
        ({"model": {"positions": "learned"}}, "positions = 'learned' has no effect with model = 'rnn'"),
        ({"model": {"encoder": "gru"}}, "encoder = 'gru' has no effect with model = 'rnn'"),
        ({"model": {"model": "attention", "gated": True}}, "gated = True has no effect with model = 'attention'"),
        (
            {"model": {"model": "attention", "reading": "max"}},
            "reading = 'max' has no effect with model = 'attention' and encoder = 'lstm'",
        ),
        (
            {"model": {"model": "attention", "encoder": "gru", "peephole": True}},
            "peephole = True has no effect with model = 'attention' and encoder = 'gru'",
        ),
        (
            {"task": "memory", "model": {"model": "transformer"}},
            "model.model must be rnn, lstm or gru with task = 'memory', found 'transformer'",
        ),
        ({"training": {"momentum": 0.5}}, "momentum = 0.5 has no effect with optimizer = 'adamw'"),
        ({"training": {"plateau_factor": 0.1}}, "plateau_factor = 0.1 has no effect with scheduler = 'none'"),
        ({"training": {"batch_tokens": 9, "batch_size": 8}}, "batch_size = 8 has no effect with batch_tokens"),
        ({"training": {"seed": 2**64}}, "training.seed: input should be less than or equal to 9223372036854775807"),
        ({"training": {"threads": 100_000}}, "training.threads: input should be less than or equal to 1024"),
        ({"model": {"hidden_size": 10**7}}, "model.hidden_size: input should be less than or equal to 1000000"),
        ({"data": {"train": ""}}, "data.train: expected the name of a file or folder, found ''"),
        ({"data": {"train": "a\0b"}}, "data.train: expected Unicode text without NUL, found 'a\\x00b'"),
        ({"output_dir": "a\udce9"}, "output_dir: expected Unicode text without NUL, found 'a\\udce9'"),
    ],
)
def test_config_mistakes_name_key_and_value(values, message):
    with pytest.raises(ConfigError) as error:
        parse_config(values, "run.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("run.yaml: ")


def test_config_lists_every_mistake():
    with pytest.raises(ConfigError) as error:
        parse_config({"training": {"batch_size": 0, "epochs": "many"}})
    assert len(str(error.value).splitlines()) == 2


def test_config_is_described_and_frozen():
    schema = Config.model_json_schema()
    for section in schema["$defs"].values():
        assert all("description" in option for option in section["properties"].values())
    assert {"task", "data.train", "model.hidden_size", "training.seed"} <= set(option_names())
    with pytest.raises(ValueError, match="frozen"):
        Config().task = "classify"


def test_yaml_mistakes_name_the_file(file, tmp_path):
    for path, message in [
        (file("bad.yaml", "data: [1"), "not valid YAML"),
        (file("list.yaml", "- 1"), "found list"),
        (file("latin.yaml", b"a: \xe9"), "not UTF-8"),
        (file("twice.yaml", "data: {train: a}\ndata: {test: b}"), "the key 'data' is given twice"),
        (file("date.yaml", "a: 2001-99-99"), "not valid YAML: month must be"),
        (file("float.yaml", "a: !!float x"), "not valid YAML: could not convert"),
        (file("long.yaml", "a: " + "1" * 5000), "not valid YAML: Exceeds the limit"),
        (file("deep.yaml", "a: " + "[" * 5000), "not valid YAML: maximum recursion"),
        (tmp_path / "none.yaml", "No such file"),
    ]:
        with pytest.raises(ConfigError, match=message) as error:
            read_yaml(path)
        assert str(error.value).startswith(str(path))
    assert read_yaml(file("empty.yaml", "# nothing\n")) == {}
    merged = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}"
    assert read_yaml(file("merge.yaml", merged))["b"] == {"x": 1, "y": 3}
