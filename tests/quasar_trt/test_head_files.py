"""Published formats of heads: what is read, and what is refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from heads import eagle_tensors, eagle_values, medusa_tensors, write_eagle, write_medusa

from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.errors import QuasarError


@pytest.fixture(scope="module")
def engine(deep_dirs):
    return open_engine(deep_dirs["BF16"], "cpu", threads=1)


def refusal(engine, name: str) -> str:
    with pytest.raises(QuasarError) as caught:
        make_drafter(name).attach(engine, None, None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"])
def test_files_of_every_kind_give_the_same_heads(engine, tmp_path, file):
    tensors = {f"medusa_head.{name}": each.half() for name, each in medusa_tensors(engine.config, 2, 1).items()}
    write_medusa(tmp_path / "heads", tensors, 2, 1, file)
    drafter = make_drafter(f"medusa:{tmp_path / 'heads'}")
    drafter.attach(engine, None, None)
    assert drafter.hidden_layers == (7,) and drafter._heads.num_heads == 2


def test_more_heads_than_the_configuration_says_are_used(engine, tmp_path):
    write_medusa(tmp_path / "heads", medusa_tensors(engine.config, 3, 1), 2, 1)
    drafter = make_drafter(f"medusa:{tmp_path / 'heads'}")
    drafter.attach(engine, None, None)
    assert drafter._heads.num_heads == 3


def test_an_older_eagle_file_is_read(engine, tmp_path):
    values = eagle_values(engine.config)
    tensors = eagle_tensors(engine.config, False, values) | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    write_eagle(tmp_path / "head", values, tensors, "pytorch_model.bin")
    make_drafter(f"eagle:{tmp_path / 'head'}").attach(engine, None, None)


def test_missing_unexpected_and_misshaped_tensors_are_listed(engine, tmp_path):
    tensors = medusa_tensors(engine.config, 2, 1)
    del tensors["1.0.linear.bias"]
    tensors |= {"extra": torch.zeros(2), "0.1.weight": torch.zeros(5, 42)}
    write_medusa(tmp_path / "heads", tensors, 2, 1)
    told = refusal(engine, f"medusa:{tmp_path / 'heads'}")
    for part in ("missing 1.0.linear.bias [42]", "unexpected extra [2]", "0.1.weight is [5, 42], must be [257, 42]"):
        assert part in told


def test_eagle_tensors_are_listed(engine, tmp_path):
    values = eagle_values(engine.config, draft_vocab_size=90)
    tensors = eagle_tensors(engine.config, True, values)
    del tensors["d2t"]
    write_eagle(tmp_path / "head", values, tensors | {"layers.1.x": torch.zeros(1)})
    told = refusal(engine, f"eagle:{tmp_path / 'head'}")
    assert "missing d2t [90]" in told and "unexpected layers.1.x [1]" in told


@pytest.mark.parametrize(
    ("third", "fields", "message"),
    [
        (False, {"vocab_size": 200}, "has vocab_size 200, the engine's model 257"),
        (False, {"hidden_size": 24}, "has hidden_size 24, the engine's model 42"),
        (False, {"num_hidden_layers": 2}, "num_hidden_layers 2; allowed: 1"),
        (False, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (True, {"draft_vocab_size": 0}, "draft_vocab_size is 0"),
    ],
)
def test_another_models_head_is_refused(engine, tmp_path, third, fields, message):
    whole = eagle_values(engine.config, draft_vocab_size=90)
    write_eagle(tmp_path / "head", whole | fields, eagle_tensors(engine.config, third, whole))
    assert message in refusal(engine, f"eagle:{tmp_path / 'head'}")


def test_a_map_beyond_the_vocabulary_is_refused(engine, tmp_path):
    values = eagle_values(engine.config, draft_vocab_size=90)
    tensors = eagle_tensors(engine.config, True, values)
    tensors["d2t"] = tensors["d2t"] + 200
    write_eagle(tmp_path / "head", values, tensors)
    assert "d2t leads to ids from" in refusal(engine, f"eagle:{tmp_path / 'head'}")


def test_an_eagle_3_head_needs_layers(engine_dirs, tmp_path):
    shallow = open_engine(engine_dirs["BF16"], "cpu", threads=1)
    values = eagle_values(shallow.config, draft_vocab_size=90)
    write_eagle(tmp_path / "head", values, eagle_tensors(shallow.config, True, values))
    assert "the model has 3 layers; allowed: 7 or more" in refusal(shallow, f"eagle:{tmp_path / 'head'}")


@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_what_is_no_head_is_refused(engine, tmp_path, name):
    directory = tmp_path / "head"
    directory.mkdir()
    drafter = f"{name}:{directory}"
    assert "cannot read" in refusal(engine, drafter)
    (directory / "config.json").write_text("[")
    assert "is not JSON" in refusal(engine, drafter)
    (directory / "config.json").write_text("{}")
    assert (
        "medusa_num_heads is None" in refusal(engine, drafter)
        if name == "medusa"
        else "lacks" in refusal(engine, drafter)
    )
    values = {"medusa_num_heads": 1, "medusa_num_layers": 1} | eagle_values(engine.config)
    (directory / "config.json").write_text(json.dumps(values))
    assert "has no weights of a head; one of: medusa_lm_head" in refusal(engine, drafter)
    file = directory / "pytorch_model.bin"
    file.write_bytes(b"no tensors")
    assert f"{file} cannot be read as tensors" in refusal(engine, drafter)
    torch.save({"x": print}, file)  # what unpickles to more than tensors is not unpickled
    assert f"{file} cannot be read as tensors" in refusal(engine, drafter)
    torch.save([torch.zeros(1)], file)
    assert "something else than tensors by name" in refusal(engine, drafter)
    assert f"{name}:DIR" in refusal(engine, name)
