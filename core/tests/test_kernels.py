"""Kernels are believed only after they agreed with plain operations."""

import mlx.core as mx
import numpy as np
import pytest

from engine_core.kernels import KernelRegistry, kernel_key


def double(x):
    return x * 2


def inputs():
    return (mx.array([1.0, -2.0, 3.5]),)


def registered(build, *, reference=double, name="double", source="x*2", registry=None, **options):
    registry = registry or KernelRegistry()
    kernel = registry.register(
        name=name,
        source=source,
        build=build,
        reference=reference,
        check_inputs=options.pop("check_inputs", inputs),
        **options,
    )
    return registry, kernel


def test_kernel_that_agrees_runs():
    calls = []

    def build(unique_name):
        def run(x):
            calls.append(unique_name)
            return x + x

        return run

    registry, kernel = registered(build)
    assert registry.report() == ()
    assert kernel(mx.array([4.0])).item() == 8.0
    assert len(calls) == 2
    (line,) = registry.report()
    assert (line.name, line.status, line.reason, line.max_error) == ("double", "active", "", 0.0)
    assert line.device == str(mx.default_device())
    kernel(mx.array([4.0]))
    assert len(calls) == 3


def test_kernel_that_differs_falls_back_visibly():
    registry, kernel = registered(lambda _: lambda x: x * 2.5)
    assert kernel(mx.array([4.0])).item() == 8.0
    (line,) = registry.report()
    assert line.status == "fallback"
    assert line.max_error == pytest.approx(0.25)
    assert "relative error" in line.reason


@pytest.mark.parametrize(
    "run",
    [
        lambda x: mx.where(x > 3, mx.nan, x * 2),
        lambda x: mx.where(x > 3, mx.inf, x * 2),
        lambda x: (x * 2)[:2],
        lambda x: (x * 2).astype(mx.float16),
        lambda x: (x * 2, x),
        lambda x: 3,
    ],
)
def test_kernel_with_unusable_result_falls_back(run):
    registry, kernel = registered(lambda _: run)
    assert kernel(mx.array([4.0])).item() == 8.0
    assert registry.report()[0].status == "fallback"


def test_kernel_with_small_error_is_accepted_within_its_tolerance():
    def run(x):
        return x * 2.0001

    for tolerance, status in ((1e-3, "active"), (1e-6, "fallback")):
        registry, kernel = registered(lambda _: run, tolerance=tolerance)
        kernel(mx.array([4.0]))
        assert registry.report()[0].status == status


@pytest.mark.parametrize(
    ("plain_error", "kernel_error", "status"),
    [
        (3e-4, 0.0, "active"),
        (3e-4, 5e-4, "active"),
        (3e-4, 7e-4, "fallback"),
        (0.0, 9e-5, "active"),
        (0.0, 2e-4, "fallback"),
        (5e-2, 1.9e-3, "active"),
        (5e-2, 5e-2, "fallback"),
        (float("nan"), 1e-2, "fallback"),
    ],
)
def test_kernel_is_judged_by_the_exact_result_where_the_device_rounds(
    plain_error, kernel_error, status
):
    """The plain operations of a device may be less exact than the kernel that replaces them."""
    registry, kernel = registered(
        lambda _: lambda x: x * (2 + 2 * kernel_error),
        reference=lambda x: x * (2 + 2 * plain_error),
        exact=lambda x: np.array(x).astype(np.float64) * 2,
    )
    kernel(mx.array([4.0]))
    (line,) = registry.report()
    assert line.status == status
    assert line.max_error == pytest.approx(kernel_error, rel=1e-2, abs=1e-7)


def test_kernel_that_cannot_be_built_falls_back():
    def build(_):
        raise ValueError("no\ncompiler")

    registry, kernel = registered(build)
    assert kernel(mx.array([4.0])).item() == 8.0
    assert registry.report()[0].reason == "ValueError: no compiler"


def test_kernel_that_raises_in_the_check_falls_back():
    def run(x):
        raise RuntimeError("bad launch")

    registry, kernel = registered(lambda _: run)
    assert kernel(mx.array([4.0])).item() == 8.0
    assert registry.report()[0].status == "fallback"
    assert registry.report()[0].max_error is None


def test_kernel_that_fails_to_evaluate_falls_back():
    def run(x):
        return mx.linalg.inv(mx.zeros((3, 3)), stream=mx.cpu)[0] + x

    registry, kernel = registered(lambda _: run)
    assert kernel(mx.array([4.0])).item() == 8.0
    assert registry.report()[0].status == "fallback"


def test_kernel_that_raises_later_falls_back_from_then_on():
    def run(x):
        if x.shape == (2,):
            raise RuntimeError("shape")
        return x + x

    registry, kernel = registered(lambda _: run)
    kernel(mx.array([4.0]))
    assert registry.report()[0].status == "active"
    assert kernel(mx.array([4.0, 5.0])).tolist() == [8.0, 10.0]
    assert registry.report()[0].reason == "RuntimeError: shape"


def test_kernel_same_name_other_source_does_not_alias():
    names = []

    def build_times(factor):
        def build(unique_name):
            names.append(unique_name)
            return lambda x: x * factor

        return build

    registry, first = registered(build_times(2), source="a")
    _, second = registered(build_times(3), reference=lambda x: x * 3, source="b", registry=registry)
    _, again = registered(build_times(7), source="a", registry=registry)
    assert again is first
    assert first(mx.array([1.0])).item() == 2.0
    assert second(mx.array([1.0])).item() == 3.0
    assert len(set(names)) == 2
    assert all(name.startswith("double_") for name in names)
    assert [line.status for line in registry.report()] == ["active", "active"]


def test_kernel_key_is_length_prefixed():
    assert kernel_key("ab", "c") == b"2:ab1:c"
    assert kernel_key("ab", "c") != kernel_key("a", "bc")
    assert kernel_key("a1:", "b") != kernel_key("a", "1:b")
    assert kernel_key("é", "") == "2:é0:".encode()


def test_kernel_integer_results_must_be_equal():
    def ints():
        return (mx.array([1, 2, 3]),)

    for offset, status in ((0, "active"), (1, "fallback")):
        registry, kernel = registered(
            lambda _, offset=offset: lambda x: x * 2 + offset, check_inputs=ints
        )
        kernel(mx.array([1]))
        assert registry.report()[0].status == status


def test_kernel_several_results_are_all_compared():
    def reference(x):
        return x, x * 2

    registry, kernel = registered(lambda _: lambda x: (x, x * 3), reference=reference)
    assert [part.item() for part in kernel(mx.array([2.0]))] == [2.0, 4.0]
    assert registry.report()[0].status == "fallback"


def test_kernel_with_equal_nan_and_infinite_results_is_accepted():
    def awkward():
        return (mx.array([mx.nan, mx.inf, -mx.inf, 0.0]),)

    registry, kernel = registered(lambda _: lambda x: x + x, check_inputs=awkward)
    kernel(mx.array([1.0]))
    assert registry.report()[0].max_error == 0.0


def test_kernel_first_used_inside_a_compiled_function_is_checked():
    registry, kernel = registered(lambda _: lambda x: x + x)
    compiled = mx.compile(lambda x: kernel(x) + 1)
    assert compiled(mx.array([4.0])).item() == 9.0
    assert registry.report()[0].status == "active"


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.bool_, mx.complex64])
def test_kernel_results_of_any_dtype_are_compared(dtype):
    def typed():
        return (mx.array([1, 0, 1]).astype(dtype),)

    registry, kernel = registered(lambda _: lambda x: x, reference=lambda x: x, check_inputs=typed)
    kernel(typed()[0])
    assert registry.report()[0].status == "active"


def test_kernel_is_checked_once_for_each_device():
    registry, kernel = registered(lambda _: lambda x: x + x)
    kernel(mx.array([1.0]))
    with mx.stream(mx.cpu):
        kernel(mx.array([1.0]))
    devices = [line.device for line in registry.report()]
    assert len(devices) == len(set(devices)) == (1 if mx.default_device() == mx.cpu else 2)
