"""Weight plans: rules over keys and shapes, without any payload."""

from __future__ import annotations

import pytest

from engine_core.errors import CheckpointError
from engine_core.weight_nodes import (
    ConcatNode,
    PermuteNode,
    Source,
    SplitNode,
    StackNode,
    sources,
)
from engine_core.weight_plan import (
    Concat,
    Drop,
    Permute,
    Rename,
    Split,
    Stack,
    TensorInfo,
    WeightPlan,
)


def info(*shape: int, dtype: str = "BF16", shard: int = 0) -> TensorInfo:
    return TensorInfo(shape, dtype, shard)


def resolve(rules, **tensors: TensorInfo):
    return WeightPlan(rules).resolve({key.replace("__", "."): t for key, t in tensors.items()})


def test_plan_without_rules_keeps_every_key() -> None:
    resolved = resolve((), a__weight=info(2, 3), b=info(4))
    assert resolved.infos == {"a.weight": info(2, 3), "b": info(4)}
    assert resolved.targets["b"] == Source("b", info(4))
    assert resolved.stored == resolved.infos
    assert resolved.dropped == {}


def test_rules_run_in_order_over_earlier_results() -> None:
    rules = (
        Rename("model.language_model.", "language_model.model."),
        Rename("model.", "language_model.model."),
        Rename("lm_head.", "language_model.lm_head."),
    )
    plan = WeightPlan(rules)
    assert plan.map_key("model.language_model.norm.weight") == ("language_model.model.norm.weight",)
    assert plan.map_key("model.norm.weight") == ("language_model.model.norm.weight",)
    assert plan.map_key("language_model.model.norm.weight") == ("language_model.model.norm.weight",)
    assert plan.map_path("lm_head") == ("language_model.lm_head",)


def test_rename_collision_names_both_sources_and_the_rule() -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve((Rename("x.", ""),), x__w=info(1), w=info(1))
    assert caught.value.code == "checkpoint.tensor_collision"
    for part in ("'w'", "'x.w'", "Rename"):
        assert part in str(caught.value)


def test_drop_needs_both_ends_and_keeps_the_reason() -> None:
    rules = (Drop("a.", ".inv_freq", "computed"), Drop(prefix="mtp.", reason="not certified"))
    resolved = resolve(
        rules, a__inv_freq=info(1), b__inv_freq=info(1), a__w=info(1), mtp__w=info(1)
    )
    assert resolved.dropped == {"a.inv_freq": "computed", "mtp.w": "not certified"}
    assert set(resolved.infos) == {"b.inv_freq", "a.w"}
    assert WeightPlan(rules).map_path("mtp.layers.0") == ()


def test_permute_changes_the_mapped_shape_and_keeps_the_stored_one() -> None:
    resolved = resolve((Permute("conv1d.weight", (0, 2, 1)),), m__conv1d__weight=info(8, 1, 4))
    assert resolved.infos["m.conv1d.weight"] == info(8, 4, 1)
    assert resolved.stored["m.conv1d.weight"] == info(8, 1, 4)
    assert isinstance(resolved.targets["m.conv1d.weight"], PermuteNode)


def test_permute_of_another_rank_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"shape must fit .*\[8, 4\]") as caught:
        resolve((Permute("conv1d.weight", (0, 2, 1)),), conv1d__weight=info(8, 4))
    assert caught.value.code == "checkpoint.tensor_shape"


def test_stack_takes_all_numbers_in_order() -> None:
    rule = Stack("e.{}.up.weight", "experts.up.weight", 3)
    tensors = {f"e.{n}.up.weight": info(2, 5, shard=n) for n in (2, 0, 1)}
    resolved = WeightPlan((rule,)).resolve(tensors)
    node = resolved.targets["experts.up.weight"]
    assert isinstance(node, StackNode)
    assert [leaf.key for leaf in sources(node)] == [f"e.{n}.up.weight" for n in range(3)]
    assert resolved.infos == {"experts.up.weight": info(3, 2, 5)}


def test_stack_absent_is_skipped_and_half_present_is_refused() -> None:
    rule = Stack("e.{}.w", "s.w", 2)
    assert set(resolve((rule,), other=info(1)).infos) == {"other"}
    with pytest.raises(CheckpointError, match=r"needs all 2 sources, got 1 without 'e\.1\.w'") as e:
        resolve((rule,), e__0__w=info(1))
    assert e.value.code == "checkpoint.tensor_missing"


@pytest.mark.parametrize("second", [info(3), info(2, dtype="F32")])
def test_stack_of_unlike_tensors_is_refused(second: TensorInfo) -> None:
    with pytest.raises(CheckpointError, match=r"e\.1\.w"):
        resolve((Stack("e.{}.w", "s.w", 2),), e__0__w=info(2), e__1__w=second)


@pytest.mark.parametrize(
    ("key", "mapped"),
    [
        ("e.1.w", "s.w"),
        ("e.2.w", "e.2.w"),
        ("e.01.w", "e.01.w"),
        ("e..w", "e..w"),
        ("e.-1.w", "e.-1.w"),
        ("e.¹.w", "e.¹.w"),
        ("e.x.w", "e.x.w"),
        ("e." + "1" * 5000 + ".w", "e." + "1" * 5000 + ".w"),
    ],
)
def test_stack_maps_only_plain_numbers_below_count(key: str, mapped: str) -> None:
    assert WeightPlan((Stack("e.{}.w", "s.w", 2),)).map_key(key) == (mapped,)


def test_split_gives_every_part_its_rows() -> None:
    rule = Split("qkv.weight", ("q.weight", "k.weight", "v.weight"), (4, 2, 2), axis=0)
    resolved = resolve((rule,), qkv__weight=info(8, 3), other=info(1))
    assert resolved.infos == {
        "other": info(1),
        "q.weight": info(4, 3),
        "k.weight": info(2, 3),
        "v.weight": info(2, 3),
    }
    node = resolved.targets["k.weight"]
    assert isinstance(node, SplitNode)
    assert (node.axis, node.start, node.stop) == (0, 4, 6)


def test_split_of_a_negative_axis_keeps_leading_axes() -> None:
    rule = Split("experts.gate_up_proj", ("g.weight", "u.weight"), (6, 6), axis=-2)
    resolved = resolve((rule,), experts__gate_up_proj=info(5, 12, 7))
    assert resolved.infos == {"g.weight": info(5, 6, 7), "u.weight": info(5, 6, 7)}


@pytest.mark.parametrize("shape", [(9, 3), ()])
def test_split_that_does_not_add_up_is_refused(shape: tuple[int, ...]) -> None:
    rule = Split("qkv", ("q", "k"), (4, 4))
    with pytest.raises(CheckpointError, match="'qkv'") as caught:
        resolve((rule,), qkv=info(*shape))
    assert caught.value.code == "checkpoint.tensor_shape"


def test_split_into_an_existing_key_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve((Split("qk", ("q", "k"), (1, 1)),), qk=info(2), k=info(1))
    assert caught.value.code == "checkpoint.tensor_collision"


def test_concat_joins_along_the_axis() -> None:
    rule = Concat(("q", "k", "v"), "qkv", axis=-2)
    resolved = resolve((rule,), q=info(4, 3), k=info(2, 3), v=info(2, 3))
    assert resolved.infos == {"qkv": info(8, 3)}
    node = resolved.targets["qkv"]
    assert isinstance(node, ConcatNode)
    assert node.axis == 0


@pytest.mark.parametrize("other", [info(2, 4), info(2, 3, dtype="F16"), info(3), info(2, 3, 1)])
def test_concat_of_unlike_tensors_is_refused(other: TensorInfo) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve((Concat(("q", "k"), "qk"),), q=info(4, 3), k=other)
    assert caught.value.code == "checkpoint.tensor_shape"


def test_concat_half_present_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve((Concat(("q", "k"), "qk"),), q=info(4, 3))
    assert caught.value.code == "checkpoint.tensor_missing"


def test_split_then_concat_uses_every_source_once() -> None:
    rules = (Split("gu", ("g", "u"), (2, 2)), Concat(("u", "g"), "ug"), Drop("x"))
    resolved = resolve(rules, gu=info(4, 3), x=info(1))
    assert resolved.infos == {"ug": info(4, 3)}
    assert [leaf.key for leaf in sources(resolved.targets["ug"])] == ["gu", "gu"]
    assert resolved.dropped == {"x": ""}


def test_dropping_one_part_does_not_report_its_source_as_unread() -> None:
    resolved = resolve((Split("gu", ("g", "u"), (2, 2)), Drop("u")), gu=info(4))
    assert set(resolved.infos) == {"g"}
    assert resolved.dropped == {}


def test_map_path_fans_out_and_follows_every_rule_kind() -> None:
    plan = WeightPlan(
        (
            Rename("model.", ""),
            Split("experts.gate_up_proj", ("sw.gate.weight", "sw.up.weight"), (2, 2), -2),
            Split("qkv.weight", ("q.weight", "k.weight"), (2, 2)),
            Stack("experts.{}.down.weight", "sw.down.weight", 4),
            Concat(("o1.weight", "o2.weight"), "o.weight"),
        )
    )
    assert plan.map_path("model.experts.gate_up_proj") == ("sw.gate", "sw.up")
    assert plan.map_path("model.qkv") == ("q", "k")
    assert plan.map_path("model.experts.3.down") == ("sw.down",)
    assert plan.map_path("o2") == ("o",)
    assert plan.map_path("untouched.deep.path") == ("untouched.deep.path",)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Drop(),
        lambda: Permute("w", (0, 2)),
        lambda: Permute("", (0,)),
        lambda: Stack("no number", "s", 2),
        lambda: Stack("{}{}", "s", 2),
        lambda: Stack("{}", "s", 0),
        lambda: Split("a", ("b",), (1, 2)),
        lambda: Split("a", ("b", "b"), (1, 2)),
        lambda: Split("a", ("b", "c"), (1, 0)),
        lambda: Concat((), "a"),
        lambda: Concat(("a", "a"), "b"),
    ],
)
def test_malformed_rule_is_refused_when_it_is_made(build) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        build()
