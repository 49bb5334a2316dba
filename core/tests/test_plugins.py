"""Discovery from real dist-info folders: one broken plugin never harms another."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess  # noqa: TID251  a fresh interpreter shows what is imported
import sys
import textwrap
import types

import pytest

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import (
    CheckpointError,
    PluginConflictError,
    PluginError,
    UnsupportedModelError,
)
from engine_core.family import FamilyInfo
from engine_core.markers import hookimpl
from engine_core.plugins import Plugins, PluginStatus

CONFIG = CheckpointConfig({"model_type": "bigram"})

GOOD = """
from engine_core.family import Architecture, FamilyInfo, NormFold, WeightPlan
from engine_core.markers import hookimpl

@hookimpl
def engine_families():
    return [FamilyInfo(name="{name}", model_types={{"{name}"}}, architectures={{"{name}LM"}})]

@hookimpl
def engine_weight_plan(family):
    return WeightPlan(rules=())

@hookimpl
def engine_architecture(config):
    return Architecture(
        build=lambda context: None, layers=(), vocab_size=4, hidden_size=2, context_length=8
    )
"""


class Site:
    """A folder on ``sys.path`` with fake installed distributions."""

    def __init__(self, folder):
        self.folder = folder
        self.modules = []

    def add(self, distribution, source, *, name=None, group="v1", version="1.0", module=None):
        module = module or f"{distribution.replace('-', '_')}_plugin"
        name = name or distribution.removeprefix("engine-")
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        with (info / "entry_points.txt").open("a") as points:
            points.write(f"[engine_core.families.{group}]\n{name} = {module}\n")
        if source is not None:
            (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        self.modules.append(module)

    def good(self, name="bigram", **more):
        self.add(f"engine-{name}", GOOD.format(name=name), **more)


@pytest.fixture
def site(tmp_path, monkeypatch):
    site = Site(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)


def rows(plugins):
    return {row.distribution: row for row in plugins.reports}


def load(**options):
    plugins = Plugins.load(**options)
    return plugins, rows(plugins)


def module(**functions):
    plugin = types.ModuleType("extra_plugin")
    for name, function in functions.items():
        setattr(plugin, name, hookimpl(function) if name.startswith("engine_") else function)
    return plugin


def families(*infos):
    def engine_families():
        return list(infos)

    return engine_families


def info(name, *model_types, **more):
    return FamilyInfo(name=name, model_types=model_types or (name,), **more)


BROKEN = {
    "import error": ("raise ImportError('no such thing')", "no such thing"),
    "syntax error": ("def broken(:", "SyntaxError"),
    "exit at import": ("raise SystemExit(3)", "SystemExit"),
    "error whose text fails": (
        """
        class Bad(Exception):
            def __str__(self):
                raise ValueError
        raise Bad
        """,
        "Bad",
    ),
    "wrong argument": (
        """
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_weight_plan(family, kofig):
            return None
        """,
        "kofig",
    ),
    "misspelt hook": (
        """
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_weigth_plan(family):
            return None
        """,
        "engine_weigth_plan",
    ),
    "misspelt specname": (
        """
        from engine_core.markers import hookimpl
        @hookimpl(specname="engine_weigth_plan")
        def plan(family):
            return None
        """,
        "engine_weigth_plan",
    ),
    "missing marker": (
        """
        def engine_families():
            return []
        """,
        "hookimpl",
    ),
    "raising contribution": (
        """
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_families():
            raise RuntimeError("cannot say")
        """,
        "cannot say",
    ),
    "exit in contribution": (
        """
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_tool_syntaxes():
            raise SystemExit
        """,
        "SystemExit",
    ),
    "raising while iterated": (
        """
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_template_dialects():
            yield 1 / 0
        """,
        "ZeroDivisionError",
    ),
    "no iterable": (
        """
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_families():
            return 5
        """,
        "iterable",
    ),
    "text for an iterable": (
        """
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_families():
            return "bad"
        """,
        "iterable",
    ),
    "wrong record": (
        """
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_families():
            return ["bad"]
        """,
        "FamilyInfo",
    ),
    "wrong dialect": (
        """
        from engine_core.family import TemplateDialect
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_template_dialects():
            return [TemplateDialect(name="d", prepare=5)]
        """,
        "prepare",
    ),
    "wrong syntax": (
        """
        from engine_core.markers import hookimpl
        class Syntax:
            name = "s"
            markers = (("<a>", ""),)
            probe_rounds = 1
            def parse(self, text, tools):
                return ()
        @hookimpl
        def engine_tool_syntaxes():
            return [Syntax()]
        """,
        "markers",
    ),
    "names of the wrong type": (
        """
        from engine_core.family import FamilyInfo
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_families():
            return [FamilyInfo(name="broken", model_types={5})]
        """,
        "model_types",
    ),
    "one name for several": (
        """
        from engine_core.family import FamilyInfo
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_families():
            return [FamilyInfo(name="broken", model_types="broken")]
        """,
        "collection of strings",
    ),
    "one name claimed twice": (
        """
        from engine_core.family import FamilyInfo
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_families():
            yield FamilyInfo(name="broken", model_types={"x"})
            yield FamilyInfo(name="other", model_types={"x"})
        """,
        "'x' twice",
    ),
    "other family name": (
        """
        from engine_core.family import FamilyInfo
        from engine_core.markers import hookimpl
        @hookimpl
        def engine_families():
            return [FamilyInfo(name="other", model_types={"x"})]
        """,
        "'other'",
    ),
}


def test_load_good_plugin_is_active_and_owns_its_model(site):
    site.good(version="2.5")
    plugins, reports = load()
    row = reports["engine-bigram"]
    assert (row.name, row.version, row.status, row.reason) == ("bigram", "2.5", "active", "")
    owner = plugins.resolve_owner("bigram")
    assert owner.family.name == "bigram"
    assert (owner.plugin.distribution, owner.plugin.version) == ("engine-bigram", "2.5")
    assert plugins.resolve_owner(None, ["Unknown", "bigramLM"]).plugin is owner.plugin


@pytest.mark.parametrize("kind", BROKEN)
def test_load_broken_plugin_is_one_failed_row_and_others_work(site, kind, capfd):
    source, word = BROKEN[kind]
    site.good("aaa")
    site.good("zzz")
    site.add("engine-broken", source)
    plugins, reports = load()
    row = reports["engine-broken"]
    assert row.status is PluginStatus.FAILED
    assert word in row.reason
    assert "\n" not in row.reason
    for name in ("aaa", "zzz"):
        assert reports[f"engine-{name}"].status is PluginStatus.ACTIVE
        owner = plugins.resolve_owner(name)
        assert plugins.architecture(owner, CONFIG, {}).vocab_size == 4
    assert "broken" not in {family.name for family in plugins.families()}
    assert capfd.readouterr() == ("", "")


def test_load_interrupt_is_not_swallowed(site):
    site.add("engine-broken", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Plugins.load()


def test_load_stale_api_is_reported_before_import(site):
    site.add("engine-old", "raise SystemExit", group="v0")
    site.add("engine-new", "raise SystemExit", group="v2")
    _, reports = load()
    assert {reports[f"engine-{name}"].status for name in ("old", "new")} == {"incompatible"}
    assert "hook API 2" in reports["engine-new"].reason
    assert not set(site.modules) & set(sys.modules)


def test_load_plugin_for_two_apis_is_loaded_once(site):
    site.good(group="v2")
    site.good(group="v1")
    plugins, _ = load()
    mine = [row for row in plugins.reports if row.distribution == "engine-bigram"]
    assert [row.status for row in mine] == ["active"]


def test_load_blocked_plugin_is_not_imported(site):
    site.good()
    site.good("other")
    plugins, reports = load(block={"bigram"})
    assert reports["engine-bigram"].status is PluginStatus.BLOCKED
    assert "engine_bigram_plugin" not in sys.modules
    assert reports["engine-other"].status is PluginStatus.ACTIVE
    with pytest.raises(UnsupportedModelError, match=r"bigram of engine-bigram blocked"):
        plugins.resolve_owner("bigram")


def test_load_shadowed_installation_is_left_out(site, tmp_path_factory, monkeypatch):
    site.good(version="1.0")
    newer = tmp_path_factory.mktemp("newer")
    monkeypatch.syspath_prepend(newer)
    Site(newer).good(version="2.0")
    plugins, _ = load()
    mine = [row.version for row in plugins.reports if row.distribution == "engine-bigram"]
    assert mine == ["2.0"]


def test_load_unreadable_metadata_is_one_failed_row(site):
    site.good()
    folder = site.folder / "engine_damaged-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-damaged\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[engine_core.families.v1]\nno equals sign\n")
    plugins, reports = load()
    assert reports["engine-bigram"].status is PluginStatus.ACTIVE
    damaged = [row for row in plugins.reports if row.name == "(unreadable)"]
    assert [row.status for row in damaged] == ["failed"]


def test_load_reports_are_sorted_whatever_the_folder_order(site):
    for name in ("zeta", "alpha", "mid"):
        site.good(name)
    plugins, _ = load()
    mine = [
        row.name
        for row in plugins.reports
        if row.distribution in map("engine-{}".format, ("zeta", "alpha", "mid"))
    ]
    assert mine == ["alpha", "mid", "zeta"]


def test_load_objects_are_independent(site):
    site.good()
    first, _ = load()
    second, _ = load(block={"bigram"})
    assert first.resolve_owner("bigram").family.name == "bigram"
    with pytest.raises(UnsupportedModelError):
        second.resolve_owner("bigram")


def test_load_extra_plugin_objects_use_the_same_door():
    good = module(engine_families=families(info("extra")))
    bad = module(engine_famlies=families(info("bad")))

    class Unhashable:
        __hash__ = None

        @hookimpl
        def engine_families(self):
            return [info("unhashable")]

    plugins = Plugins.load(extra=[good, bad, Unhashable()])
    mine = [row for row in plugins.reports if row.distribution == "(extra)"]
    assert [row.status for row in mine] == ["active", "failed", "failed"]
    assert "hashable" in mine[2].reason
    assert plugins.resolve_owner("extra").plugin.implementation is good
    assert "unhashable" not in {family.name for family in plugins.families()}


def test_load_same_object_twice_is_one_plugin():
    plugin = module(engine_families=families(info("extra")))
    plugins = Plugins.load(extra=[plugin, plugin])
    mine = [row.status for row in plugins.reports if row.distribution == "(extra)"]
    assert mine == ["active", "failed"]
    assert plugins.resolve_owner("extra").plugin.implementation is plugin


def test_model_type_claimed_twice_belongs_to_nobody_until_chosen(site):
    for name in ("one", "two"):
        source = GOOD.format(name=name).replace(f'model_types={{"{name}"}}', 'model_types={"same"}')
        site.add(f"engine-{name}", source)
    plugins, reports = load()
    assert {reports[f"engine-{name}"].status for name in ("one", "two")} == {"active"}
    assert "engine-two" in reports["engine-one"].reason
    with pytest.raises(PluginConflictError) as caught:
        plugins.resolve_owner("same")
    assert "engine-one 1.0" in str(caught.value)
    assert "engine-two 1.0" in str(caught.value)
    assert "family=" in caught.value.hint
    for name in ("one", "two"):
        owner = plugins.resolve_owner("same", family=name)
        assert owner.plugin.distribution == f"engine-{name}"
    assert Plugins.load(block={"one"}).resolve_owner("same").family.name == "two"


def test_family_name_claimed_twice_cannot_be_chosen():
    plugins = Plugins.load(
        extra=[
            module(engine_families=families(info("same", "a"))),
            module(engine_families=families(info("same", "b"))),
        ]
    )
    assert plugins.resolve_owner("a").family.model_types == {"a"}
    with pytest.raises(PluginConflictError):
        plugins.resolve_owner("a", family="same")


@pytest.mark.parametrize(
    ("model_type", "architectures", "got"),
    [("other", ("OneLM",), "'other'"), (None, ("OtherLM",), "'OtherLM'")],
)
def test_family_that_does_not_claim_the_checkpoint_is_refused(model_type, architectures, got):
    one = info("one", "one", "uno", architectures={"OneLM"})
    plugins = Plugins.load(extra=[module(engine_families=families(one))])
    with pytest.raises(UnsupportedModelError) as caught:
        plugins.resolve_owner(model_type, architectures, family="one")
    assert caught.value.code == "model.family_mismatch"
    assert got in str(caught.value)
    assert ("'one', 'uno'" if model_type else "'OneLM'") in str(caught.value)
    for claimed in ("one", "uno"):
        assert plugins.resolve_owner(claimed, (), family="one").family is one
    for names in (["OneLM"], ["OtherLM", "OneLM"], []):
        assert plugins.resolve_owner(None, names, family="one").family is one


def test_error_for_a_type_that_nobody_claims_does_not_offer_a_family():
    plugins = Plugins.load(extra=[module(engine_families=families(info("one")))])
    for arguments in (("other",), (None, ["OtherLM"]), ("one", (), "other")):
        with pytest.raises(UnsupportedModelError) as caught:
            plugins.resolve_owner(*arguments)
        assert "family=" not in caught.value.hint


def test_architectures_decide_only_without_model_type():
    one = info("one", architectures={"OneLM", "BothLM"})
    two = info("two", architectures={"TwoLM", "BothLM"})
    plugins = Plugins.load(
        extra=[module(engine_families=families(one)), module(engine_families=families(two))]
    )
    assert plugins.resolve_owner(None, ["TwoLM"]).family is two
    assert plugins.resolve_owner("one", ["TwoLM"]).family is one
    with pytest.raises(UnsupportedModelError):
        plugins.resolve_owner("unknown", ["TwoLM"])
    for names in (["BothLM"], ["OneLM", "TwoLM"]):
        with pytest.raises(PluginConflictError):
            plugins.resolve_owner(None, names)


def test_one_plugin_may_bring_two_families():
    one, two = info("one", architectures={"OneLM"}), info("two", architectures={"TwoLM"})
    plugins = Plugins.load(extra=[module(engine_families=families(one, two))])
    assert plugins.resolve_owner("one").family is one
    assert plugins.resolve_owner("two").family is two
    with pytest.raises(PluginConflictError):
        plugins.resolve_owner(None, ["OneLM", "TwoLM"])


def test_unsupported_model_lists_known_types_and_broken_plugins(site):
    site.good()
    site.add("engine-broken", "raise ImportError('needs more')")
    site.add("engine-old", "", group="v0")
    plugins, _ = load()
    with pytest.raises(UnsupportedModelError) as caught:
        plugins.resolve_owner("brkn")
    text = str(caught.value)
    for word in ("'bigram'", "got 'brkn'", "broken of engine-broken failed", "needs more", "old"):
        assert word in text
    for arguments in ({"model_type": None}, {"model_type": "bigram", "family": "missing"}):
        with pytest.raises(UnsupportedModelError):
            plugins.resolve_owner(**arguments)


def question(**functions):
    plugin = module(engine_families=families(info("bigram")), **functions)
    plugins = Plugins.load(extra=[plugin])
    return plugins, plugins.resolve_owner("bigram")


def test_question_wrong_answer_names_plugin_and_hook():
    plugins, owner = question(engine_norm_fold=lambda family: 5, engine_weight_plan=lambda: None)
    with pytest.raises(PluginError, match=r"extra_plugin.*engine_norm_fold.*NormFold.*int"):
        plugins.norm_fold(owner, CONFIG, {})
    for ask in (plugins.weight_plan, plugins.architecture):
        with pytest.raises(PluginError) as caught:
            ask(owner, CONFIG, {})
        assert caught.value.code == "plugin.answer"
    assert plugins.mtp(owner, CONFIG, {}) is None
    assert plugins.media(owner, CONFIG, {}, CONFIG) is None


@pytest.mark.parametrize("error", [RuntimeError("broken inside"), SystemExit(2)])
def test_question_failure_is_wrapped_with_its_cause(error):
    def engine_mtp(config):
        raise error

    plugins, owner = question(engine_mtp=engine_mtp)
    with pytest.raises(PluginError, match="engine_mtp") as caught:
        plugins.mtp(owner, CONFIG, {})
    assert caught.value.code == "plugin.hook_failed"
    assert caught.value.__cause__ is error


def test_question_engine_error_passes_with_a_note():
    error = CheckpointError("config.json: must be good, got bad", code="checkpoint.bad")

    def engine_media(processor):
        raise error

    plugins, owner = question(engine_media=engine_media)
    with pytest.raises(CheckpointError) as caught:
        plugins.media(owner, CONFIG, {}, CONFIG)
    assert caught.value is error
    assert "engine_media" in error.__notes__[0]
    assert "extra_plugin" in error.__notes__[0]


def test_question_is_asked_of_the_owner_alone():
    asked = []

    def spy(name):
        def engine_mtp(family):
            asked.append((name, family))

        return engine_mtp

    # Registered last, so that pluggy would ask it first.
    plugins = Plugins.load(
        extra=[
            module(engine_families=families(info("mine")), engine_mtp=spy("owner")),
            module(engine_families=families(info("other")), engine_mtp=spy("hijacker")),
        ]
    )
    plugins.mtp(plugins.resolve_owner("mine"), CONFIG, {})
    assert asked == [("owner", "mine")]


class Syntax:
    markers = (("<call>", "</call>"),)
    probe_rounds = 1

    def __init__(self, name):
        self.name = name

    def parse(self, text, tools):
        return ()


def test_contributions_are_asked_once_and_ordered_by_preference():
    asked = []
    shared = [Syntax("a"), Syntax("b"), Syntax("c")]

    def engine_tool_syntaxes():
        asked.append(1)
        return iter(shared)

    mine = info("mine", tool_syntaxes=("c", "not-installed", "a"))
    plugins = Plugins.load(
        extra=[
            module(engine_tool_syntaxes=engine_tool_syntaxes),
            module(engine_families=families(mine)),
        ]
    )
    owner = plugins.resolve_owner("mine")
    for _ in range(3):
        names = [syntax.name for syntax in plugins.tool_syntaxes(owner)]
        assert [name for name in names if name in "abc"] == ["c", "a", "b"]
        assert [s.name for s in plugins.tool_syntaxes() if s.name in "abc"] == ["a", "b", "c"]
    assert asked == [1]


def test_syntax_claimed_twice_is_used_by_nobody():
    one = module(engine_tool_syntaxes=lambda: [Syntax("same"), Syntax("fine")])
    two = module(engine_tool_syntaxes=lambda: [Syntax("same")])
    wants = module(engine_families=families(info("wants", tool_syntaxes=("same",)), info("else")))
    plugins = Plugins.load(extra=[one, two, wants])
    assert "same" not in {syntax.name for syntax in plugins.tool_syntaxes()}
    assert "fine" in {
        syntax.name for syntax in plugins.tool_syntaxes(plugins.resolve_owner("else"))
    }
    with pytest.raises(PluginConflictError, match="tool syntax 'same'"):
        plugins.tool_syntaxes(plugins.resolve_owner("wants"))


def test_load_imports_no_mlx_and_prints_nothing(site):
    site.good()
    program = """
import json, sys
from engine_core.plugins import Plugins
plugins = Plugins.load(block=json.loads(sys.argv[1]))
status = {row.distribution: row.status for row in plugins.reports}["engine-bigram"]
loaded = [name for name in ("mlx", "jinja2", "tokenizers", "jsonschema") if name in sys.modules]
print(json.dumps([status, loaded]))
"""
    # Other installed families answer for themselves.
    others = [
        point.name
        for point in importlib.metadata.entry_points(group="engine_core.families.v1")
        if point.name != "bigram"
    ]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program, json.dumps(others)],
        capture_output=True,
        check=True,
        env={"PYTHONPATH": str(site.folder)},
    )
    assert json.loads(done.stdout) == ["active", []]
    assert done.stderr == b""
