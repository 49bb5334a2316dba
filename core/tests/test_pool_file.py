"""A stored prefix in a file: what comes back, and everything that is refused."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core import CacheError, Client, EngineError, InvalidRequest, Session
from engine_core.cache.build import build_caches
from engine_core.cache.layers import detach_caches, distinct_caches
from engine_core.cache.pool_file import read_prefix, write_prefix
from engine_core.family import Full, Recurrent, Shared, Sliding
from engine_core.plugins import Plugins
from engine_core.prompt_key import MediaSpan, PromptKey
from engine_core.testing import layered
from engine_core.testing.layered import HYBRID_KINDS, write_layered_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WINDOW = 8
SPECS = (
    Full(kv_heads=2, head_dim=4, value_dim=3),
    Shared(donor=0),
    Sliding(window=WINDOW, kv_heads=1, head_dim=4),
    Recurrent(shapes=((3, 4), (5,)), dtypes=("compute", "float32")),
)
MESSAGES = [
    {"role": "system", "content": "think of the user"},
    {"role": "user", "content": "hello world"},
]
FOLLOW = [*MESSAGES, {"role": "assistant", "content": "x"}, {"role": "user", "content": "tool"}]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(extra=[layered])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layered_checkpoint(tmp_path_factory.mktemp("model"), HYBRID_KINDS)


@pytest.fixture(scope="module")
def session(model: Path, plugins: Plugins) -> Iterator[Session]:
    with Session.load(model, plugins=plugins) as loaded:
        yield loaded


def filled(length: int, dtype: Any = mx.float32) -> list[Any]:
    """Caches of every kind after that many random rows."""
    caches: list[Any] = build_caches(SPECS, dtype)
    key = mx.random.key(7)

    def draw(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=key).astype(dtype)

    full, _, sliding, recurrent = caches
    full.append(draw(1, 2, length, 4), draw(1, 2, length, 3))
    sliding.append(draw(1, 1, length, 4), draw(1, 1, length, 4))
    fed = draw(1, length, 1)
    slots = (draw(1, 3, 4), mx.random.normal((1, 5), key=key))
    recurrent.run(lambda *_: (fed, [slots]), (fed,))
    return caches


def states(caches: list[Any]) -> list[Any]:
    return [
        (name, array.dtype, array.astype(mx.float32).tolist())
        for cache in distinct_caches(caches)
        for name, array in cache.state().items()
    ]


def load(path: Any, caches: list[Any] | None = None, **named: Any) -> PromptKey:
    options = {"fingerprint": "model", "budget_bytes": 2**20, "vocab_size": 1000, **named}
    caches = build_caches(SPECS, mx.float32) if caches is None else caches
    return read_prefix(path, options.pop("fingerprint"), caches, **options)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("length", [1, 6, 7, 23, 24, 300])
def test_prefix_comes_back_as_it_was(length: int, dtype: Any, tmp_path: Path) -> None:
    key = PromptKey(tuple(range(length)), (MediaSpan(0, 1, b"cat"),))
    caches = filled(length, dtype)
    detach_caches(caches)
    write_prefix(tmp_path / "prefix", "model", key, caches)
    back = build_caches(SPECS, dtype)
    assert load(tmp_path / "prefix", back) == key
    assert states(back) == states(caches)
    assert [cache.offset for cache in back] == [length] * 4
    assert back[0] is back[1]
    assert [cache.earliest for cache in back] == [cache.earliest for cache in caches]
    assert stat.S_IMODE((tmp_path / "prefix").stat().st_mode) == 0o600


def test_prefix_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    write_prefix(tmp_path / "a.safetensors", "model", PromptKey((1, 2, 3)), filled(3))
    arrays, metadata = mx.load(str(tmp_path / "a.safetensors"), return_metadata=True)
    assert arrays["ids"].tolist() == [1, 2, 3]
    assert metadata["fingerprint"] == "model"
    assert arrays["layers.0.keys"].shape == (1, 2, 3, 4)


def test_writing_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    path.write_bytes(b"old")
    write_prefix(path, "model", PromptKey((1, 2, 3)), filled(3))
    assert load(path).ids == (1, 2, 3)
    assert os.listdir(tmp_path) == ["prefix"]  # noqa: PTH208


def test_longest_name_of_a_file_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_prefix(path, "model", PromptKey((1, 2)), filled(2))
    assert load(path).ids == (1, 2)


def test_write_into_a_missing_folder_is_a_typed_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "prefix", tmp_path):
        with pytest.raises(CacheError) as caught:
            write_prefix(path, "model", PromptKey((1, 2, 3)), filled(3))
        assert caught.value.code == "cache.file"
    assert not list(tmp_path.iterdir())


# What is refused.


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], payload: bytes = b"") -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + size])
    change(fields)
    header = json.dumps(fields).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + (payload or data[8 + size :]))


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        # The payload stays covered: another tensor takes the bytes over under a name of no layer.
        fields[f"other.{name}"] = fields.pop(name)

    return change


def set_metadata(**named: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["__metadata__"].update(named)


def reshape(name: str, shape: list[int]) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields[name].update(shape=shape)


DAMAGE: dict[str, Callable[[dict[str, Any]], None]] = {
    "another format": set_metadata(format="pickle"),
    "no metadata": lambda fields: fields.pop("__metadata__"),
    "wrong digest": set_metadata(sha256="0" * 64),
    "media beyond the end": set_metadata(media='[[0, 99, "00"]]'),
    "media is no list": set_metadata(media='{"a": 1}'),
    "media is no JSON": set_metadata(media="["),
    "a layer is missing": drop("layers.2.keys"),
    "ids are missing": drop("ids"),
    "keys turned": reshape("layers.0.keys", [1, 2, 4, 20]),
    "ids in two rows": reshape("ids", [2, 10]),
    "slots turned": reshape("layers.3.slots.0", [1, 4, 3]),
    "ids as floats": lambda fields: fields["ids"].update(dtype="F32"),
    "keys as integers": lambda fields: fields["layers.0.keys"].update(dtype="I32"),
    "keys of a dtype that no layer has": lambda fields: fields["layers.0.keys"].update(dtype="U32"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    write_prefix(path, "model", PromptKey(tuple(range(20))), filled(20))
    rewrite(path, DAMAGE[damage])
    with pytest.raises(CacheError) as caught:
        load(path)
    assert caught.value.code == "cache.file"


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(at=st.integers(0, 4000), value=st.integers(1, 255), cut=st.booleans())
def test_any_changed_byte_or_truncation_is_a_typed_error(
    tmp_path: Path, at: int, value: int, cut: bool
) -> None:
    path = tmp_path / "prefix"
    write_prefix(path, "model", PromptKey(tuple(range(20))), filled(20))
    data = bytearray(path.read_bytes())
    at %= len(data)
    if cut:
        del data[at:]
    else:
        data[at] ^= value
    path.write_bytes(data)
    codes, keys = [], []
    try:
        keys.append(load(path))
    except EngineError as exc:
        codes.append(exc.code)
    # Spaces that pad the header may change their kind; nothing else can go unnoticed.
    assert set(codes) <= {"cache.file", "cache.other_model"}
    assert codes or (chr(data[at]).isspace() and keys[0].ids == tuple(range(20)))


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    write_prefix(tmp_path / "prefix", "model", PromptKey((1, 2)), filled(2))
    with pytest.raises(CacheError) as caught:
        load(tmp_path / "prefix", fingerprint="other")
    assert caught.value.code == "cache.other_model"


def test_file_beyond_its_bounds_is_refused(tmp_path: Path) -> None:
    write_prefix(tmp_path / "prefix", "model", PromptKey((1, 999)), filled(2))
    for options, code in (
        ({"budget_bytes": 10}, "cache.too_large"),
        ({"vocab_size": 999}, "cache.file"),
    ):
        with pytest.raises(CacheError) as caught:
            load(tmp_path / "prefix", **options)
        assert caught.value.code == code


def test_file_of_another_kind_is_refused_without_advice_to_delete_it(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"ids": mx.array([1, 2])})
    with pytest.raises(CacheError) as caught:
        load(tmp_path / "weights.safetensors")
    assert caught.value.code == "cache.file"
    assert caught.value.hint.startswith("name a file that save_cache wrote")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", ".", "nul\0"):
        with pytest.raises(CacheError) as caught:
            load(f"{tmp_path}/{name}")
        assert caught.value.code == "cache.file"


# Through the session and the client.


def test_saved_conversation_serves_another_process(
    session: Session, model: Path, plugins: Plugins, tmp_path: Path
) -> None:
    cold = session.generate(FOLLOW, max_tokens=5, prompt_cache=False)
    session.generate(MESSAGES, max_tokens=3)
    saved = session.save_cache(tmp_path / "prefix", FOLLOW)
    with Session.load(model, plugins=plugins) as other:
        assert other.load_cache(tmp_path / "prefix") == saved
        assert other.load_cache(tmp_path / "prefix") == saved
        assert other.cache_info().entries == 1
        reply = other.generate(FOLLOW, max_tokens=5)
        assert reply.usage.cached_tokens == saved
        assert reply.token_ids == cold.token_ids


def test_client_saves_and_loads_on_its_worker(
    model: Path, plugins: Plugins, tmp_path: Path
) -> None:
    ids = list(range(40))
    with Client.load(model, plugins=plugins) as client:
        cold = client.complete([*ids, 3], max_tokens=4)
        assert client.save_cache(tmp_path / "prefix", prompt=[*ids, 3]) == 40
    with Client.load(model, plugins=plugins) as client:
        assert client.load_cache(tmp_path / "prefix") == 40
        assert client.cache_info().entries == 1
        reply = client.complete([*ids, 3], max_tokens=4)
        assert (reply.token_ids, reply.usage.cached_tokens) == (cold.token_ids, 40)


def test_clients_of_one_process_save_and_load_one_file_at_once(
    model: Path, plugins: Plugins, tmp_path: Path
) -> None:
    ids = list(range(40))

    def save_and_load(client: Client) -> None:
        for _ in range(25):
            assert client.save_cache(tmp_path / "prefix", prompt=[*ids, 3]) == 40
            assert client.load_cache(tmp_path / "prefix") == 40

    with (
        Client.load(model, plugins=plugins) as one,
        Client.load(model, plugins=plugins) as other,
        ThreadPoolExecutor() as threads,
    ):
        cold = [client.complete([*ids, 3], max_tokens=4) for client in (one, other)]
        list(threads.map(save_and_load, (one, other, one, other)))
        assert one.complete([*ids, 3], max_tokens=4).token_ids == cold[0].token_ids
    assert os.listdir(tmp_path) == ["prefix"]  # noqa: PTH208


def test_saving_what_is_not_stored_is_a_typed_error(session: Session, tmp_path: Path) -> None:
    with pytest.raises(CacheError) as caught:
        session.save_cache(tmp_path / "prefix", prompt=[150, 151, 152])
    assert caught.value.code == "cache.not_stored"
    for path in (3, None, b"bytes"):
        with pytest.raises(InvalidRequest) as refused:
            session.save_cache(path, MESSAGES)
        assert refused.value.code == "request.path"
        with pytest.raises(InvalidRequest):
            session.load_cache(path)
    for named in ({}, {"messages": MESSAGES, "prompt": "x"}):
        with pytest.raises(InvalidRequest):
            session.save_cache(tmp_path / "prefix", **named)
    assert not list(tmp_path.iterdir())


def test_loading_into_a_pool_without_room_is_a_typed_error(
    session: Session, model: Path, plugins: Plugins, tmp_path: Path
) -> None:
    session.complete(list(range(300)), max_tokens=1)
    session.save_cache(tmp_path / "prefix", prompt=list(range(300)))
    for budget, code in ((0, "cache.no_pool"), (1000, "cache.too_large")):
        with Session.load(model, plugins=plugins, prompt_cache_bytes=budget) as small:
            with pytest.raises(CacheError) as caught:
                small.load_cache(tmp_path / "prefix")
            assert caught.value.code == code
            assert small.cache_info().entries == 0


def test_file_of_another_checkpoint_is_refused(
    session: Session, plugins: Plugins, tmp_path: Path
) -> None:
    session.complete(list(range(30)), max_tokens=1)
    session.save_cache(tmp_path / "prefix", prompt=list(range(30)))
    path = write_layered_checkpoint(tmp_path / "other", HYBRID_KINDS, seed=6)
    with Session.load(path, plugins=plugins) as other:
        with pytest.raises(CacheError) as caught:
            other.load_cache(tmp_path / "prefix")
        assert caught.value.code == "cache.other_model"
