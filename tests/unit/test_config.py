"""What settings accept, what they refuse and in which words, and which layer wins."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from mlxpool.shared import config
from mlxpool.shared.config import Cache, ConfigError, Defaults, History, ModelSettings, Pool, Server, load


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, text: str) -> str:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, {})
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_without_a_file_every_value_is_its_default(tmp_path: Path) -> None:
    settings = load(None, {"MLXPOOL_HOME": str(tmp_path)}, {})
    assert settings.server == Server(host="127.0.0.1", port=8420)
    assert settings.pool == Pool(
        memory_budget="75%",
        idle_ttl=900.0,
        load_timeout=600.0,
        queue_limit=64,
        queue_timeout=600.0,
        stall_timeout=60.0,
        drain_timeout=120.0,
    )
    assert settings.cache == Cache(
        ram=8 * 10**9,
        ssd=True,
        ssd_budget=32 * 10**9,
        idle_demote=300.0,
        verify=True,
        spill_queue=2 * 10**9,
    )
    assert settings.defaults == Defaults()
    assert settings.home == tmp_path
    assert settings.origins == {}


def test_a_full_file_is_read_in_the_units_it_is_written_in(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [server]
        host = "0.0.0.0"
        port = 9000
        api_keys = ["one", "two"]
        allowed_hosts = ["box.local"]
        allowed_origins = ["https://chat.example"]
        [pool]
        memory_budget = "48GB"
        idle_ttl = "never"
        load_timeout = "90s"
        queue_limit = 3
        drain_timeout = 0
        [aliases]
        "claude-*" = "small"
        [defaults]
        model = "small"
        temperature = 1
        [models."small"]
        path = "here/small"
        pin = true
        idle_ttl = 0
        context = 4096
        batch = 2
        top_k = 40
        """,
    )
    settings = load(path, {}, {})
    assert settings.server.api_keys == ("one", "two")
    assert settings.client_key == "one"
    assert settings.pool.idle_ttl == math.inf
    assert settings.pool.load_timeout == 90.0
    assert settings.pool.drain_timeout == 0.0
    assert settings.budget_bytes(64 * 10**9) == 48 * 10**9
    assert settings.aliases == {"claude-*": "small"}
    assert settings.defaults.temperature == 1.0
    assert settings.models["small"] == ModelSettings(
        path=str(tmp_path / "here/small"), pin=True, idle_ttl=0.0, context=4096, batch=2, top_k=40
    )


def test_file_gives_way_to_environment_and_environment_to_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 1\n[pool]\nqueue_limit = 1\nstall_timeout = 1\n")
    env = {"MLXPOOL_SERVER_PORT": "2", "MLXPOOL_POOL_QUEUE_LIMIT": "2"}
    settings = load(path, env, {"server.port": 3, "server.host": None})
    assert (settings.server.port, settings.pool.queue_limit, settings.pool.stall_timeout) == (3, 2, 1.0)
    assert settings.origins == {
        "server.port": "--port",
        "pool.queue_limit": "MLXPOOL_POOL_QUEUE_LIMIT",
        "pool.stall_timeout": str(path),
    }


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("srver.port", "command line: unknown setting srver.port; did you mean server?"),
        ("server.prot", "command line: unknown key --prot; did you mean port?"),
    ],
)
def test_an_unknown_flag_is_refused(tmp_path: Path, flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {}, {"home": str(tmp_path), flag: 1})
    assert str(caught.value) == message


def test_the_homes_own_file_is_read_when_none_is_named(tmp_path: Path) -> None:
    write(tmp_path, "[server]\nport = 7\n")
    settings = load(None, {}, {"home": str(tmp_path)})
    assert settings.server.port == 7
    assert settings.config_path == tmp_path / "config.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sever]\n", "unknown section [sever]; did you mean server?"),
        ("[server]\nprot = 1\n", "unknown key server.prot; did you mean port?"),
        ("[server]\nport = 70000\n", "server.port = 70000: use a whole number from 0 to 65535"),
        ("[server]\nport = true\n", "server.port = True: use a whole number from 0 to 65535"),
        ('[server]\nport = "80"\n', "server.port = '80': use a whole number from 0 to 65535"),
        ("server = 3\n", "server = 3: write a table: [server]"),
        (
            '[server]\nhost = "0.0.0.0"\n',
            "server.host = '0.0.0.0': set server.api_keys too, or use a loopback address",
        ),
        (
            '[server]\nallowed_origins = ["*"]\n',
            "server.allowed_origins = ['*']: use a list of origins, like [\"https://chat.example\"]",
        ),
        (
            '[pool]\nmemory_budget = "130%"\n',
            "pool.memory_budget = '130%': not a share: '130%'; use more than 0% and at most 100%",
        ),
        (
            '[pool]\nmemory_budget = "lots"\n',
            "pool.memory_budget = 'lots': not a size or a share: 'lots'; "
            "use bytes, a size like 48GB or a share like 75%",
        ),
        (
            "[pool]\nmemory_budget = -1\n",
            "pool.memory_budget = -1: not a size or a share: -1; "
            "use bytes, a size like 48GB or a share like 75%",
        ),
        (
            "[pool]\nmemory_budget = 0\n",
            "pool.memory_budget = 0: a budget of 0 holds no model; use a size like 48GB or a share like 75%",
        ),
        (
            "[pool]\nstall_timeout = 0\n",
            'pool.stall_timeout = 0: use more than 0 seconds, or a duration like "10m"',
        ),
        ("[pool]\nidle_ttl = -2\n", "pool.idle_ttl = -2: a duration must be zero or more seconds: -2"),
        ("[pool]\nqueue_limit = 0\n", "pool.queue_limit = 0: use a whole number, 1 or more"),
        ("[defaults]\ntop_p = 0\n", "defaults.top_p = 0: use a number above 0 and at most 1"),
        ("[defaults]\ntemperature = nan\n", "defaults.temperature = nan: use a number from 0 to 2"),
        ('[models."a"]\nbatch = 0\n', 'models."a".batch = 0: use a whole number from 1 to 256'),
        ('[models."a"]\nbatches = 1\n', 'unknown key models."a".batches; did you mean batch?'),
        (
            '[models."../a"]\nbatch = 1\n',
            '[models."../a"] is no model name; use the name of a model: a folder\'s name or org/name',
        ),
        ('[aliases]\n"a?" = "b"\n', "aliases.\"a?\" = 'b': an alias is a name; * is its only wildcard"),
        ('[aliases]\n"a" = "b*"\n', "aliases.\"a\" = 'b*': use the name of one model"),
        (
            '[aliases]\n"a" = "b"\n"b" = "c"\n',
            "aliases.\"a\" = 'b': an alias leads to a model, not to another alias",
        ),
        ("[cache]\nram = -1\n", "cache.ram = -1: a size can't be negative: -1"),
        ("[cache]\nssd = 1\n", "cache.ssd = 1: use true or false"),
        ("[cache]\nrom = 1\n", "unknown key cache.rom; did you mean ram?"),
        ("[history]\nmax_bytes = -1\n", "history.max_bytes = -1: a size can't be negative: -1"),
        ("[history]\nage = 1\n", "unknown key history.age; did you mean max_age?"),
        ("[defaults]\nthinking = 1\n", "defaults.thinking = 1: use true or false"),
        ('[models."a"]\nkv_bits = 4\n', 'models."a".kv_bits is not in this version yet; remove it'),
        ("[colibri]\nslots = 0\n", 'colibri.slots = 0: use "auto", or a whole number, 1 or more'),
        ('[models."a"]\nmtp = true\n', 'models."a".mtp = True: use one of auto, on, off'),
        ('[colibri]\nprefetch = "yes"\n', "colibri.prefetch = 'yes': use \"auto\", or true or false"),
        ("[colibri]\npins = 0.6\n", "colibri.pins = 0.6: use a number from 0 to 0.5"),
        ("[colibri]\ndraft_confidence = 1.5\n", "colibri.draft_confidence = 1.5: use a number from 0 to 1"),
        ("[colibri]\nreserve = 0\n", 'colibri.reserve = 0: use "auto", or bytes or a size like 5GB'),
        ('[models."a"]\nexperts = "disk"\n', "models.\"a\".experts = 'disk': use one of stream, resident"),
    ],
)  # fmt: skip
def test_a_refusal_names_key_value_and_what_would_work(tmp_path: Path, text: str, message: str) -> None:
    assert refused(tmp_path, text) == message


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    assert "not valid TOML" in refused(tmp_path, "[server]\nport = = 3\n")
    assert "line 2" in refused(tmp_path, "[server]\nport = = 3\n")
    assert "line 3" in refused(tmp_path, "[server]\nport = 3\nhost = [")


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml: no such config file"):
        load(tmp_path / "nowhere.toml", {}, {})
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't be read"):
        load(path, {}, {})


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ('[server]\napi_keys = ["sk-secret key"]\n', "server.api_keys"),
        ('[server]\napi_keys = "sk-secret"\n', "server.api_keys"),
        ('[server.api_keys]\nann = "sk-secret"\n', "server.api_keys"),
        ('[[server]]\napi_keys = ["sk-secret"]\n', "server"),
        ('[aliases]\napi_keys = ["sk-secret"]\n', 'aliases."api_keys"'),
        ('[aliases]\n"api_keys?" = ["sk-secret"]\n', 'aliases."api_keys?"'),
        ('models = [{api_keys = ["sk-secret"]}]\n', "models"),
    ],
)
def test_a_refusal_never_shows_a_key(tmp_path: Path, text: str, label: str) -> None:
    message = refused(tmp_path, text)
    assert message.startswith(f"{label} = (hidden): ")
    assert "secret" not in message


def test_a_key_in_the_environment_is_not_shown_either(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"MLXPOOL_SERVER_API_KEYS": "sk-secret key", "MLXPOOL_HOME": str(tmp_path)}, {})
    said = "MLXPOOL_SERVER_API_KEYS = (hidden): use a list of keys in visible ASCII, without spaces"
    assert str(caught.value) == f"environment: {said}"


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", ["folder", "pipe", "link to itself"])
def test_a_config_that_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, kind: str, named: bool
) -> None:
    path = tmp_path / "config.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    with pytest.raises(ConfigError) as caught:
        load(path if named else None, {"MLXPOOL_HOME": str(tmp_path)}, {})
    why = "Too many levels of symbolic links" if kind == "link to itself" else "not a regular file"
    assert str(caught.value) == f"{path}: can't be read: {why}"


def test_a_link_into_nowhere_is_no_absent_config(tmp_path: Path) -> None:
    (tmp_path / "config.toml").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"config.toml: no such config file$"):
        load(None, {"MLXPOOL_HOME": str(tmp_path)}, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("closed", ["config.toml", "."])
def test_a_config_that_may_not_be_read_is_refused(tmp_path: Path, closed: str) -> None:
    path = write(tmp_path, "")
    (tmp_path / closed).chmod(0)
    try:
        with pytest.raises(ConfigError) as caught:
            load(None, {"MLXPOOL_HOME": str(tmp_path)}, {})
    finally:
        (tmp_path / closed).chmod(0o700)
    assert str(caught.value) == f"{path}: can't be read: Permission denied"


def test_a_config_may_be_no_file_at_all(tmp_path: Path) -> None:
    write(tmp_path, "[server]\nport = 7\n")
    assert load(Path(os.devnull), {"MLXPOOL_HOME": str(tmp_path)}, {}).server.port == 8420


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "1" * 5000])
def test_toml_that_python_cannot_hold_is_refused(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text).startswith("not valid TOML: ")


@pytest.mark.parametrize("value", ['"' + "9" * 400 + 'GB"', '"' + "9" * 400 + 's"', "1" + "0" * 400])
@pytest.mark.parametrize("key", ["memory_budget", "idle_ttl"])
def test_a_number_without_an_end_is_refused(tmp_path: Path, key: str, value: str) -> None:
    assert refused(tmp_path, f"[pool]\n{key} = {value}\n").startswith(f"pool.{key} = ")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"MLXPOOL_POOL_IDL_TTL": "1"},
            "environment: unknown MLXPOOL_POOL_IDL_TTL; did you mean MLXPOOL_POOL_IDLE_TTL?",
        ),
        (
            {"MLXPOOL_COLIBRI_SLOTS": "few"},
            "environment: MLXPOOL_COLIBRI_SLOTS = 'few': use \"auto\", or a whole number, 1 or more",
        ),
        (
            {"MLXPOOL_SRVER_PORT": "1"},
            "environment: unknown MLXPOOL_SRVER_PORT; did you mean MLXPOOL_SERVER_PORT?",
        ),
        ({"MLXPOOL_HOM": "/x"}, "environment: unknown MLXPOOL_HOM; did you mean MLXPOOL_HOME?"),
        (
            {"MLXPOOL_DEFAULTS_FOO": "1"},
            "environment: unknown MLXPOOL_DEFAULTS_FOO; known are MLXPOOL_DEFAULTS_MODEL, "
            "MLXPOOL_DEFAULTS_MAX_TOKENS, MLXPOOL_DEFAULTS_TEMPERATURE, MLXPOOL_DEFAULTS_TOP_P, "
            "MLXPOOL_DEFAULTS_TOP_K, MLXPOOL_DEFAULTS_THINKING",
        ),
        (
            {"MLXPOOL_DEFAULTS_MODEL": "\udcff"},
            "environment: MLXPOOL_DEFAULTS_MODEL = '\\udcff': use the name of "
            "a model: a folder's name or org/name",
        ),
        (
            {"MLXPOOL_SERVER_PORT": "x"},
            "environment: MLXPOOL_SERVER_PORT = 'x': use a whole number from 0 to 65535",
        ),
    ],
)
def test_a_bad_variable_is_refused_by_name(tmp_path: Path, env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {**env, "MLXPOOL_HOME": str(tmp_path)}, {})
    assert str(caught.value) == message


def test_a_variable_that_is_near_none_is_answered_with_all_of_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"MLXPOOL_FOO": "1", "MLXPOOL_HOME": str(tmp_path)}, {})
    message = str(caught.value)
    assert message.startswith(
        "environment: unknown MLXPOOL_FOO; known are MLXPOOL_SERVER_HOST, MLXPOOL_SERVER_"
    )
    assert message.endswith(", MLXPOOL_DEFAULTS_THINKING, MLXPOOL_HOME")


def test_a_home_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^home: '/\\udcff' is not valid UTF-8; use another folder$"):
        load(None, {"MLXPOOL_HOME": "/\udcff"}, {})


def test_variables_are_read_as_what_their_key_is(tmp_path: Path) -> None:
    env = {
        "MLXPOOL_HOME": str(tmp_path),
        "MLXPOOL_SERVER_API_KEYS": "one, two",
        "MLXPOOL_POOL_IDLE_TTL": "-1",
        "MLXPOOL_POOL_STALL_TIMEOUT": "2m",
        "MLXPOOL_POOL_MEMORY_BUDGET": "1000000",
        "MLXPOOL_DEFAULTS_TEMPERATURE": "0.5",
    }
    settings = load(None, {**env, "MLXPOOL_CACHE_RAM": "512MiB", "MLXPOOL_CACHE_SSD": "0"}, {})
    assert settings.cache == Cache(ram=512 * 2**20, ssd=False)
    assert settings.server.api_keys == ("one", "two")
    assert settings.pool.idle_ttl == math.inf
    assert settings.pool.stall_timeout == 120.0
    assert settings.budget_bytes(10**12) == 1_000_000
    assert settings.defaults.temperature == 0.5


def test_a_models_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--models = .*gone': name a folder that exists"):
        load(None, {}, {"home": str(tmp_path), "models": (str(tmp_path / "gone"),)})
    settings = load(None, {}, {"home": str(tmp_path), "models": (str(tmp_path),)})
    assert settings.model_dirs == (tmp_path,)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.9.9.9", True), ("192.168.1.2", False),
     ("::", False), ("box.local", False)],
)  # fmt: skip
def test_only_a_loopback_address_needs_no_key(tmp_path: Path, host: str, allowed: bool) -> None:
    flags = {"home": str(tmp_path), "server.host": host}
    if allowed:
        assert load(None, {}, flags).server.host == host
    else:
        with pytest.raises(ConfigError, match="set server.api_keys too"):
            load(None, {}, flags)
    assert load(None, {"MLXPOOL_SERVER_API_KEYS": "k"}, flags).server.host == host


def test_a_model_inherits_what_it_does_not_say(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[pool]\nidle_ttl = 5\n[defaults]\ntemperature = 0.2\ntop_k = 3\n[models."a"]\ntop_k = 9\n',
    )
    settings = load(path, {}, {})
    own = settings.model("a")
    assert (own.idle_ttl, own.temperature, own.top_k, own.rows(streamed=False)) == (5.0, 0.2, 9, 8)
    assert settings.model("unnamed").temperature == 0.2


def test_streaming_is_chosen_for_all_models_and_for_one(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[colibri]\nslots = 12\nreserve = "5GB"\n[models."a"]\nslots = "auto"\nprefetch = false\n'
        'pins = 0.25\nexperts = "stream"\n',
    )
    settings = load(path, {"MLXPOOL_COLIBRI_MTP": "on", "MLXPOOL_COLIBRI_QUEUE_DEPTH": "4"}, {})
    one, other = settings.model("a"), settings.model("b")
    assert (one.slots, one.prefetch, one.pins, one.experts) == ("auto", False, 0.25, "stream")
    assert (other.slots, other.prefetch, other.pins, other.experts) == (12, "auto", 0.0, None)
    assert (one.mtp, one.queue_depth, one.reserve) == ("on", 4, 5_000_000_000)
    assert (one.rows(streamed=True), ModelSettings(batch=2).rows(streamed=True)) == (1, 2)


def test_a_budget_is_explicit_only_when_someone_chose_it(tmp_path: Path) -> None:
    assert not load(None, {}, {"home": str(tmp_path)}).budget_is_explicit
    assert load(None, {}, {"home": str(tmp_path), "pool.memory_budget": "75%"}).budget_is_explicit
    assert load(write(tmp_path, '[pool]\nmemory_budget = "75%"\n'), {}, {}).budget_is_explicit


@pytest.mark.parametrize("section", [Server, Pool, Cache, History, Defaults, ModelSettings])
def test_schema_and_struct_name_the_same_keys_with_the_same_defaults(section: type) -> None:
    schema = config.json_schema()["properties"]
    if section is ModelSettings:
        table = schema["models"]["additionalProperties"]
    else:
        table = schema[section.__name__.lower()]
    assert table["additionalProperties"] is False
    assert set(table["properties"]) == set(section.__struct_fields__)
    for name, described in table["properties"].items():
        default = getattr(section(), name)
        assert described.get("default") == (list(default) if isinstance(default, tuple) else default)
        assert described["description"].endswith(".")


def test_schema_knows_every_section() -> None:
    assert set(config.json_schema()["properties"]) == {
        "server",
        "pool",
        "cache",
        "history",
        "colibri",
        "defaults",
        "aliases",
        "models",
    }


def test_history_is_kept_for_a_month_in_half_a_gibibyte_unless_said_otherwise(tmp_path: Path) -> None:
    assert load(write(tmp_path, ""), {}, {}).history == History(30 * 86400.0, 512 * 2**20)
    own = load(write(tmp_path, '[history]\nmax_age = "7d"\nmax_bytes = "1GiB"\n'), {}, {}).history
    assert own == History(7 * 86400.0, 2**30)
    assert load(write(tmp_path, '[history]\nmax_age = "never"\n'), {}, {}).history.max_age == math.inf
