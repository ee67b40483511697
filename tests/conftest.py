"""What every test shares: eight devices, golden texts, the budget of property tests."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests import xla_flags

# Before jax is imported, which reads all of them once; processes of tests do so, too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile once and run once; code that is made to run often takes XLA longer.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
            # Eight devices on two cores: XLA ends the process when a collective has
            # waited 40 seconds for its last participant.
            "--xla_cpu_collective_call_terminate_timeout_seconds=600",
            xla_flags.QUICKLY,
        ]
    )
# Kernels for GPUs that are not there never run, so nothing assembles them.  Half of
# compiling a step is ptxas, and XLA's text, schedule and memory are the same to the
# byte without it (JAX 0.12).  JAX reads this before it looks for the real one.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["CUDA_ROOT"] = str(Path(__file__).parent / "targets" / "cuda")

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jhost.lowering.pipeline import VERIFIES_EACH

pytest_plugins = ["jhost.pytest_plugin"]

GOLDEN = Path(__file__).parent / "golden"
COMPILED = pytest.StashKey[str]()  # the folder of compiled programs

# A promotion that was not meant shows as an error.  Code that is not ours and needs
# another mode is called under `jax.numpy_dtype_promotion("standard")`.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Users' programs are verified at the end, here behind each pass.
VERIFIES_EACH.set(True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jhost")
    group.addoption(
        "--examples",
        type=int,
        default=6,
        metavar="N",
        help="how many examples a property test tries (default: %(default)s; of rules "
        "and plans at most 25)",
    )
    group.addoption(
        "--variants",
        type=int,
        default=None,
        metavar="N",
        help="how many variants of each test to try (0: all; default: 2 in a run of "
        "all tests, and all of a file or a folder that is named)",
    )
    group.addoption(
        "--half",
        type=int,
        choices=(0, 1),
        default=None,
        help="try what CI tries with the oldest JAX (0) or with the newest (1), which "
        "together try all tests",
    )
    group.addoption(
        "--keep-compiled",
        action="store_true",
        help="keep what XLA compiles in pytest's cache for the next run with this "
        "(default: for the workers of this run)",
    )
    group.addoption(
        "--programs",
        type=int,
        default=None,
        metavar="N",
        help="how many random programs the tests of whole programs try (default: as "
        "many as --examples); with --hypothesis-seed others than without",
    )
    group.addoption(
        "--explore",
        action="store_true",
        help="have property tests try other programs on every run",
    )
    group.addoption(
        "--require-gpu-compiler",
        action="store_true",
        help="fail where what compiles for GPUs is missing, instead of skipping",
    )
    group.addoption(
        "--update-golden",
        action="store_true",
        help="write the texts under tests/golden instead of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.variants is None:
        all_tests = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        config.option.variants = 2 if all_tests else 0
    # A worker of pytest-xdist is always told what to run.
    given: Any = getattr(config, "workerinput", {})
    config.option.variants = given.get("variants", config.option.variants)
    config.stash[COMPILED] = given.get("compiled") or _folder_of_compiled(config)
    _share_compiled(config.stash[COMPILED])
    examples: Any = config.getoption("--examples")
    programs: Any = config.getoption("--programs")
    seed: Any = config.getoption("--hypothesis-seed")
    hypothesis.settings.register_profile(
        "jhost",
        max_examples=min(25, examples),  # for rules and plans
        deadline=None,  # most of an example's time is XLA's, once per program
        # The same programs on every run, so that a failure is the change's own; but for
        # a few numbers that hypothesis takes from the code of all modules then loaded.
        derandomize=not config.getoption("explore"),
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("jhost")
    # Where all programs are tried by two runs, they are not to be the same twice.
    hypothesis.settings.register_profile(
        "programs",
        max_examples=programs or examples,
        derandomize=seed is None and not config.getoption("explore"),
    )


def _folder_of_compiled(config: pytest.Config) -> str:
    if config.getoption("keep_compiled"):
        return str(config.cache.mkdir("xla"))
    folder = tempfile.mkdtemp(prefix="jhost-compiled-")
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    return folder


def _share_compiled(folder: str) -> None:
    """What one test compiled, no other compiles again, in whatever worker.

    Half of all that tests ask of XLA was asked before: operations alone, operands that
    go to their devices, what is compared.  Names are in the key, as tests read them in
    compiled programs; lines are in no program but for `lines_in_programs`.
    """
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    jax.config.update("jax_traceback_in_locations_limit", 0)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["variants"] = node.config.option.variants
    node.workerinput["compiled"] = node.config.stash[COMPILED]


# The stages whose code asks nothing of JAX that its versions answer differently, and
# what we measure with.  What does ask is tried with either: rules, the frontend,
# emission, interpretation, and whole programs.  These are tried once, with the
# oldest JAX: the newest has all that needs flax or compiles for GPUs.
OLDEST = (
    "lowering/cost/",
    "lowering/ir/",
    "lowering/layouts/",
    "lowering/loops/",
    "lowering/padding/",
    "lowering/schedule/",
    "lowering/streams/",
    "lowering/units/",
    "lowering/verify/",
    "test_benchmarks.py",
    "test_names.py",
    "test_step_benchmark.py",
)
# What all stages together give, who ask nothing more of JAX: of these files each test
# is tried with one of the two, one in four with the newest.
EITHER = (
    "examples/test_decode.py",
    "examples/test_notebooks.py",
    "examples/test_pipeline.py",
    "jhost/test_annotate.py",
    "jhost/test_arguments.py",
    "jhost/test_backward.py",
    "jhost/test_batched_loops.py",
    "jhost/test_brought_meshes.py",
    "jhost/test_calibrate.py",
    "jhost/test_commands.py",
    "jhost/test_damaged.py",
    "jhost/test_demo.py",
    "jhost/test_distributed_mesh.py",
    "jhost/test_docstrings.py",
    "jhost/test_dot_product_attention.py",
    "jhost/test_dtypes.py",
    "jhost/test_empty.py",
    "jhost/test_errors.py",
    "jhost/test_explain.py",
    "jhost/test_gradient_accumulation.py",
    "jhost/test_pattern_gradients.py",
    "jhost/test_profile.py",
    "jhost/test_puts.py",
    "jhost/test_pytest_plugin.py",
    "jhost/test_ragged_dot.py",
    "jhost/test_report_pages.py",
    "jhost/test_residual_cut.py",
    "jhost/test_ring_attention.py",
    "jhost/test_ring_written_out.py",
    "jhost/test_summary.py",
    "jhost/test_testing.py",
    "jhost/test_tune.py",
    "jhost/test_whole_programs.py",
    "jhost/test_wide_values.py",
    "jhost/test_wishes.py",
    "lowering/rules/test_narrow_sums.py",
    "lowering/rules/test_ragged.py",
    "lowering/rules/test_random.py",
    "lowering/rules/test_random_numbers.py",
    "lowering/rules/test_written_attention.py",
    "lowering/rules/test_xla_attention.py",
    "lowering/test_passes.py",
    "runtime/test_agreement.py",
    "runtime/test_launch.py",
    "runtime/test_nccl.py",
    "test_found_programs.py",
    "test_patterns.py",
    "test_readme.py",
    "test_torch_step.py",
    "test_wheel.py",
)
# What needs the compiler for GPUs, flax or optax, which the oldest does not have.
NOT_THERE = (
    "tests/aot/",
    "nnx",
    "tests/examples/test_llama.py",
    "tests/jhost/test_training.py",
    "tests/test_examples.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What the other half alone tries is not even imported."""
    half: Any = config.getoption("half")
    if half is None or config.option.keyword:
        return None
    place = collection_path.as_posix().removeprefix(f"{Path(__file__).parent}/")
    stages = tuple(each for each in OLDEST if each.endswith("/"))
    others = place.startswith(stages) if half else needs_newest(f"tests/{place}")
    return True if others else None


def needs_newest(name: str) -> bool:
    return any(each in name for each in NOT_THERE)


@pytest.hookimpl(tryfirst=True)  # before `-m` is asked
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    for item in items:
        if needs_newest(item.nodeid):
            item.add_marker("newest")
    if left_out := set() if config.option.keyword else _left_out(config, items):
        config.hook.pytest_deselected(items=[i for i in items if i in left_out])
        items[:] = [item for item in items if item not in left_out]
    # The tests of whole programs and of processes take longest, and stand at the top:
    # no worker is to begin one of them when the others come to their end.
    items.sort(key=lambda item: len(_place(item.path)))


@functools.cache  # there are thousands of tests in each of three processes
def _place(file: Path) -> tuple[str, ...]:
    """Where a file of tests stands: its folders below this one, and its name."""
    return file.relative_to(Path(__file__).parent).parts


def _left_out(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """The variants that the options of this run leave to others."""
    most: Any = config.getoption("variants")
    half: Any = config.getoption("half")
    if half is not None:
        each = _grouped(items, _halved).items()
        return {i for (by, _), some in each for i in _other_half(by, some, half)}
    quick = (item for item in items if not item.get_closest_marker("slow"))
    each = _grouped(quick, lambda item: item.nodeid.partition("[")[0]).values()
    return {item for some in each for item in _beyond(most, some)}


def _grouped(
    items: Iterable[pytest.Item], key: Callable[[pytest.Item], Any]
) -> dict[Any, list[pytest.Item]]:
    found: dict[Any, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _halved(item: pytest.Item) -> tuple[str, str]:
    """Which JAX tries a test, and what of its variants are halved together."""
    file = "/".join(_place(item.path))
    if item.get_closest_marker("newest"):
        return "newest", ""
    if file.startswith(OLDEST):
        return "oldest", ""
    if file in EITHER:
        return "either", file
    slow = item.get_closest_marker("slow")
    return ("newest", "") if slow else ("both", item.nodeid.partition("[")[0])


def _other_half(
    tried_by: str, variants: list[pytest.Item], half: int
) -> Iterator[pytest.Item]:
    """What the other of CI's two runs tries: 0 is with the oldest JAX."""
    for number, item in enumerate(variants):
        # Not each second one: what takes turns among variants is in both halves.
        halves = {
            "oldest": 0,
            "newest": 1,
            "either": int(number % 4 == 1),
            "both": number.bit_count() % 2 if len(variants) > 1 else half,
        }
        if halves[tried_by] != half:
            yield item


def _beyond(most: int, variants: list[pytest.Item]) -> Iterator[pytest.Item]:
    """All but so many variants (0: all), which are spread evenly."""
    for n, item in enumerate(variants):
        if most and n * most // len(variants) == (n - 1) * most // len(variants):
            yield item


def pytest_collection_finish() -> None:
    """What was imported stays, and tests make few cycles: garbage is sought less."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_report_header() -> str:
    import jhost

    where = Path(jhost.__file__).parent
    devices = f"{jax.device_count()} {jax.default_backend()} devices"
    return f"jhost: {where}, JAX {jax.__version__}, {devices}"


@pytest.fixture(autouse=True)
def as_little_optimized_as_before() -> Iterator[None]:
    """With XLA's optimizations left on, the tests that follow compile twice as long."""
    before = jax.config.read("jax_disable_most_optimizations")
    yield
    assert jax.config.read("jax_disable_most_optimizations") == before


@pytest.fixture
def beside_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples import what stands next to them, as scripts do, and time one call."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    measure = importlib.import_module("measure")

    def called_once(f: Callable[..., Any], *args: Any) -> float:
        jax.block_until_ready(f(*args))
        return 1.0

    monkeypatch.setattr(measure, "milliseconds", called_once)


@pytest.fixture
def options_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missed options are warned of, whatever tests before asked for and were told."""
    from jhost.runtime import compiler_options

    monkeypatch.setattr(compiler_options, "_given", None)
    compiler_options._warn_once.cache_clear()  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def uncombined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer stands for itself, of whatever size."""
    from jhost.lowering.loops import combine_small

    monkeypatch.setattr(combine_small, "SMALL", 0)


@pytest.fixture
def combined_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small transfers become one on CPUs too."""
    from jhost.lowering.loops import combine_small

    monkeypatch.setattr(combine_small, "JOINED_BY_XLA", frozenset[str]())


@pytest.fixture
def lines_in_programs() -> Iterator[None]:
    """Lowered programs say where in the source they are from, as users' do."""
    jax.config.update("jax_traceback_in_locations_limit", 10)  # JAX's default
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """XLA compiles all that it is asked for, whatever was kept."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text)`: `text` equals tests/golden/<module>/<test>.txt.

    `golden(text, name)` is for a test with several: <test>-<name>.txt.
    """
    module = request.path.relative_to(Path(__file__).parent).with_suffix("")
    test = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
    update = request.config.getoption("update_golden")

    def compare(text: str, name: str | None = None) -> None:
        stem = test if name is None else f"{test}-{name}"
        path = GOLDEN / module / f"{stem}.txt"
        shown = path.relative_to(GOLDEN.parent.parent)
        text = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists():
            pytest.fail(
                f"There is no {shown}.  Make it with "
                f"`pytest --update-golden {request.node.nodeid}`, and read it."
            )
        else:
            assert text == path.read_text(), (
                f"{shown} differs.  If the new text is right, run the test with "
                "--update-golden, and read the diff."
            )

    return compare
