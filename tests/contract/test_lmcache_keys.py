"""What LMCache promises of its keys, for both makers, and that both read each other's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_differences import expected
from contract_kits import BF16, modules

TAG = "lmcache.tag."


def key(maker: Any, chunk: Any = 0xABC, worker: int = 1, dtype: Any = BF16, configs: Any = None, **fields: Any) -> Any:
    return maker.Key(**{
        "model_name": "org/model", "world_size": 4, "worker_id": worker, "chunk_hash": chunk, "dtype": dtype,
        "request_configs": configs, **fields,
    })  # fmt: skip


STRINGS = [
    (0xABC, None, "org/model@4@1@abc@bfloat16"),
    (-5, None, "org/model@4@1@-5@bfloat16"),
    (2**70, None, "org/model@4@1@400000000000000000@bfloat16"),
    (b"\x01\xff", None, "org/model@4@1@01ff@bfloat16"),
    (1, {TAG + "user": "ann", "other": 3}, "org/model@4@1@1@bfloat16@user%ann"),
    (1, {TAG + "b": 2, TAG + "a": "x%y"}, "org/model@4@1@1@bfloat16@b%2@a%x%y"),
]


@pytest.mark.parametrize(("chunk", "configs", "text"), STRINGS, ids=[s for _, _, s in STRINGS])
def test_strings_of_keys(maker: Any, chunk: Any, configs: Any, text: str) -> None:
    assert key(maker, chunk, configs=configs).to_string() == text


def test_strings_of_layers_keys(maker: Any) -> None:
    layers = key(maker, 255, configs={TAG + "u": "v"}).split_layers(3)
    assert [k.to_string() for k in layers] == [f"org/model@4@1@ff@bfloat16@{i}@u%v" for i in range(3)]
    assert [k.layer_id for k in layers] == [0, 1, 2]
    assert key(maker, 255).get_first_layer() == key(maker, 255).split_layers(1)[0]


@pytest.mark.parametrize("chunk", [0, 0xABC, -5, 2**70])
def test_a_string_reads_back_equal(maker: Any, chunk: int) -> None:
    for one in (key(maker, chunk), key(maker, chunk, configs={TAG + "u": "ann"})):
        back = maker.parse(one.to_string())
        assert back == one and hash(back) == hash(one) and type(back) is maker.Key
        assert maker.Key.from_string(one.to_string()) == one
        layer = one.split_layers(3)[2]
        assert maker.parse(layer.to_string()) == layer == maker.LayerKey.from_string(layer.to_string())
        assert type(maker.parse(" " + layer.to_string() + "\n")) is maker.LayerKey


def test_what_a_string_cannot_say(maker: Any) -> None:
    """A bytes hash reads back as a number, a tag's value as a str, other configs are gone."""
    raw = key(maker, b"\x01\xff")
    assert maker.parse(raw.to_string()).chunk_hash == 0x1FF != raw.chunk_hash and maker.parse(raw.to_string()) != raw
    number = key(maker, 1, configs={TAG + "n": 5})
    assert maker.parse(number.to_string()).tags == (("n", "5"),) and maker.parse(number.to_string()) != number
    assert maker.parse(key(maker, 1, configs={"x": 1}).to_string()) == key(maker, 1)


@pytest.mark.parametrize(
    "text",
    ["", "a@1@2@3", "model@with@at@4@1@ff@bfloat16", "m@x@1@ff@bfloat16", "m@4@1@zz@bfloat16",
     "m@4@1@ff@bfloat16@tag-without-percent"],
)  # fmt: skip
def test_what_is_no_key_is_a_value_error(maker: Any, text: str) -> None:
    with pytest.raises(ValueError):
        maker.parse(text)


def test_a_dtype_that_is_none(maker: Any) -> None:
    with pytest.raises(expected(maker, "dtype in a string", ours=ValueError, lmcache=KeyError)):
        maker.parse("m@4@1@ff@complex")


def test_what_makes_keys_equal(maker: Any) -> None:
    base = key(maker)
    assert base == key(maker) and hash(base) == hash(key(maker)) and len({base, key(maker)}) == 1
    for other in (
        key(maker, 0xABD), key(maker, worker=2), key(maker, dtype=torch.float16), key(maker, model_name="m"),
        key(maker, world_size=2), key(maker, configs={TAG + "u": "v"}), base.split_layers(1)[0],
        key(maker, b"\x0a\xbc"),
    ):  # fmt: skip
        assert base != other
    assert base == key(maker, configs={"anything": "else"}), "only tags count"
    one, two = ({TAG + "a": "1", TAG + "b": "2"}, {TAG + "b": "2", TAG + "a": "1"})
    assert key(maker, configs=one) != key(maker, configs=two), "and their order"
    layers = base.split_layers(2)
    assert layers[0] != layers[1] and layers[0] == base.get_first_layer() != base
    assert base != "org/model@4@1@abc@bfloat16"


def test_another_rank_of_the_same_chunk(maker: Any) -> None:
    moved = key(maker, 7, configs={TAG + "u": "v"}).with_new_worker_id(0)
    assert moved.worker_id == 0 and moved.chunk_hash == 7 and moved.tags == (("u", "v"),)
    layer = key(maker, 7).split_layers(2)[1]
    assert type(layer.with_new_worker_id(3)) is maker.Key


DTYPES = {
    torch.half: "half", torch.float16: "half", BF16: "bfloat16", torch.float: "float", torch.double: "double",
    torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.bool: "bool", torch.float8_e4m3fn: "fp8_e4m3fn", torch.float8_e5m2: "fp8_e5m2",
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_keys(maker: Any, dtype: torch.dtype) -> None:
    one = key(maker, dtype=dtype)
    assert one.to_string().endswith(f"@{DTYPES[dtype]}") and maker.parse(one.to_string()).dtype == dtype


def test_a_dtype_that_keys_cannot_have(maker: Any) -> None:
    with pytest.raises(ValueError):
        key(maker, dtype=torch.complex64)


def test_dicts_of_keys(maker: Any) -> None:
    """All request configs are kept, as strings."""
    one = key(maker, b"\x01\xff", configs={TAG + "u": "v", "x": 3})
    d = one.to_dict()
    assert d["__type__"] == "CacheEngineKey" and d["dtype"] == "bfloat16"
    assert d["request_configs"] == [f"{TAG}u%v", "x%3"]
    back = maker.Key.from_dict(d)
    assert back == one and back.chunk_hash == b"\x01\xff" and back.request_configs == {TAG + "u": "v", "x": "3"}
    with pytest.raises(ValueError):
        maker.Key.from_dict({**d, "request_configs": ["no percent"]})


@pytest.mark.parametrize(("chunk", "configs", "text"), STRINGS, ids=[s for _, _, s in STRINGS])
def test_both_makers_read_each_others_keys(chunk: Any, configs: Any, text: str) -> None:
    pytest.importorskip("lmcache")
    ours, theirs = modules("ours"), modules("lmcache")
    one, two = key(ours, chunk, configs=configs), key(theirs, chunk, configs=configs)
    assert one.to_string() == two.to_string() and one.chunk_hash_hex == two.chunk_hash_hex and one.tags == two.tags
    assert one.to_dict() == two.to_dict()
    assert ours.Key.from_dict(two.to_dict()).to_string() == text == theirs.Key.from_dict(one.to_dict()).to_string()
    for a, b in zip(one.split_layers(2), two.split_layers(2), strict=True):
        assert a.to_string() == b.to_string()
