"""`mesh-llm service`: its files, and a whole life under a real systemd where one can be started."""

from __future__ import annotations

import json
import plistlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.cli.service_files import Service, agent_text, environment_text, unit_text
from mesh_llm.errors import UsageError
from mesh_llm.home import cache_folder
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, encode
from mesh_llm.types import Address, MeshId
from tests.support.command import MESH_LLM, Ended, Running, mesh_llm, start
from tests.support.joining import write_model

INVITER = Identity.from_secret(bytes(range(32)))
INVITE = Invite(
    id="00112233445566ff",
    mesh=MeshId(INVITER.id),
    secret=bytes(16),
    inviter=INVITER.id,
    address=Address(direct=("192.0.2.7:4433",)),
)
TOKEN = encode(INVITE, INVITER)
SYSTEMD = Path("/lib/systemd/systemd")

# Runs as the first process of namespaces of its own, where /run and the control groups are empty.
LIFE = """
import json, os, pathlib, subprocess, sys, time

def sh(*argv):
    return subprocess.run(argv, capture_output=True, text=True)

def setup():
    for argv in (
        ("mount", "-t", "tmpfs", "tmpfs", "/run"),
        ("mkdir", "-p", "/run/systemd/system", "/run/user/me", "/run/groups"),
        ("mount", "-t", "cgroup2", "none", "/run/groups"),
        ("mount", "--move", "/run/groups", "/sys/fs/cgroup"),
    ):
        done = sh(*argv)
        if done.returncode:
            return f"{' '.join(argv)}: {done.stderr.strip()}"
    os.environ["XDG_RUNTIME_DIR"] = "/run/user/me"
    subprocess.Popen([systemd, "--user"])
    for _ in range(150):
        if sh("systemctl", "--user", "is-system-running").stdout.strip() in ("running", "degraded"):
            return None
        time.sleep(0.1)
    return "systemd --user does not start"

def mesh_llm(*argv):
    return sh(*program, *argv)

def service():
    return json.loads(mesh_llm("service", "status", "--json", "--home", home).stdout)

def until(what, condition, within_s=60):
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {within_s} s: {what}; {sh('tail', home + '/logs/node.log').stdout}")
        time.sleep(0.2)
    return found

def serving():
    said = mesh_llm("status", "--json", "--home", home)
    return said.returncode == 0 and json.loads(said.stdout)["node"]["state"] == "serving"

systemd, home, model, *program = sys.argv[1:]
if why := setup():
    print(json.dumps({"skipped": why}))
    raise SystemExit
installed = mesh_llm("service", "install", "--", "--home", home, "--model", model, "--port", "0",
                     "--ctx-size", "512", "--parallel", "1", "--threads", "1", "--api-key", "s3cret")
if installed.returncode:
    raise SystemExit(installed.stderr)
until("it serves", serving)
first = service()
command_line = pathlib.Path(f"/proc/{first['pid']}/cmdline").read_text()
sh("kill", "-9", str(first["pid"]))
second = until("it is restarted", lambda: (now := service())["restarts"] == 1 and now["pid"] and now)
until("it serves again", serving)
sh("systemctl", "--user", "stop", first["name"])
stopped = sh("systemctl", "--user", "show", "--property=Result,ExecMainStatus", first["name"]).stdout
removed = mesh_llm("service", "uninstall", "--home", home)
print(json.dumps({
    "installed": installed.stdout, "first": first, "second": second, "command_line": command_line,
    "removed": removed.stdout + removed.stderr,
    "stopped": stopped,
    "after": mesh_llm("service", "status", "--home", home).stderr,
}))
"""


def install(home: Path, folder: Path, *options: str | Path, env: dict[str, str] | None = None) -> Ended:
    return mesh_llm(
        *("service", "install", "--no-start", "--", "--home", home, *options),
        env={"XDG_CONFIG_HOME": str(folder), **(env or {})},
        cwd=folder,
    )


def unit_of(folder: Path) -> Path:
    (unit,) = (folder / "systemd" / "user").iterdir()
    return unit


needs_systemctl = pytest.mark.skipif(not shutil.which("systemctl"), reason="systemctl is missing")


@needs_systemctl
def test_secrets_go_to_a_private_file_and_nowhere_else(home: Path, tmp_path: Path) -> None:
    ended = install(
        *(home, tmp_path, "--api-key", "s3cret $HOME", "--name", 'a "b" $c %d', "--port", "9400"),
        env={"MESH_LLM_RELAY_TOKEN": "of-the-relay"},
    )

    assert (ended.status, ended.stderr) == (0, "")
    unit = unit_of(tmp_path)
    assert ended.stdout == f"Wrote {unit}\n"
    text = unit.read_text()
    assert '"serve" "--plain" "--home"' in text
    assert '"--name" "a \\"b\\" $$c %%d" "--port" "9400"\n' in text
    assert "s3cret" not in text
    assert "relay" not in text
    variables = home / "service.env"
    assert variables.stat().st_mode & 0o777 == 0o600
    read = subprocess.check_output(
        ["sh", "-c", f'. {variables}; echo "$MESH_LLM_API_KEY|$MESH_LLM_RELAY_TOKEN"'], text=True
    )
    assert read == "s3cret $HOME|of-the-relay\n"


@needs_systemctl
def test_systemd_accepts_the_unit(home: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    assert install(home, tmp_path, "--name", "50 % of $x").status == 0

    verified = subprocess.run(
        ["systemd-analyze", "--user", "verify", unit_of(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )

    assert (verified.returncode, verified.stderr) == (0, "")


@needs_systemctl
def test_options_are_checked_before_anything_is_written(home: Path, tmp_path: Path) -> None:
    wrong = install(home, tmp_path, "--ctx-size", "0")
    unknown = install(home, tmp_path, "--no-such-option")
    joining = install(home, tmp_path, "--join", "mesh1-x")

    assert (wrong.status, unknown.status, joining.status) == (2, 2, 2)
    assert wrong.stderr.startswith("Error: --ctx-size 0 is not between")
    assert unknown.stderr.startswith("Error: No such option '--no-such-option'")
    assert joining.stderr.startswith("Error: --join and --no-start cannot be used together")
    assert list(tmp_path.iterdir()) == []
    assert list(home.iterdir()) == []


@needs_systemctl
def test_no_service_yet(home: Path, tmp_path: Path) -> None:
    for verb in ("status", "uninstall", "logs"):
        ended = mesh_llm("service", verb, "--home", home, env={"XDG_CONFIG_HOME": str(tmp_path)})
        assert (ended.status, ended.stderr) == (
            1,
            f"Error: no service is installed for {home}\nHint: mesh-llm service install\n",
        )


@needs_systemctl
def test_without_a_session_of_systemd(home: Path, tmp_path: Path) -> None:
    ended = mesh_llm(
        *("service", "install", "--home", home),
        env={
            "XDG_CONFIG_HOME": str(tmp_path),
            "XDG_RUNTIME_DIR": str(tmp_path),
            "DBUS_SESSION_BUS_ADDRESS": "",
        },
    )

    assert ended.status == 1
    assert ended.stderr.startswith("Error: systemctl --user daemon-reload failed: ")
    assert "Hint: log in as this user" in ended.stderr


def stand_in(folder: Path) -> dict[str, str]:
    """A systemctl that notes what it is told, and says that the service runs."""
    (folder / "bin").mkdir()
    systemctl = folder / "bin" / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$2" >>{folder}/told\necho ActiveState=active\n')
    systemctl.chmod(0o755)
    return {"XDG_CONFIG_HOME": str(folder), "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_interrupted_install_changes_nothing(
    home: Path, tmp_path: Path, number: signal.Signals, is_first: bool
) -> None:
    env = stand_in(tmp_path)
    if not is_first:
        assert install(home, tmp_path, "--api-key", "earlier", env=env).status == 0
    units = tmp_path / "systemd" / "user"
    before = {path: path.read_text() for path in [*units.glob("*"), *home.glob("service.env")]}
    assert len(before) == (0 if is_first else 2)
    told = tmp_path / "told"

    with start("service", "install", "--", "--home", home, "--join", TOKEN, env=env) as running:
        running.until(lambda: told.exists() and "restart" in told.read_text(), what="the service is started")
        running.until(lambda: TOKEN in (home / "service.env").read_text(), what="it waits for the node")
        running.signal(number)
        ended = running.wait()

    assert ended.status == 128 + number
    found = {path: path.read_text() for path in [*units.glob("*"), *home.glob("service.env")]}
    assert found == before
    name = Service(home=home).name
    state = "not installed" if is_first else "as it was"
    assert ended.stderr.strip() == f"Interrupted: {name} is {state}"
    orders = told.read_text().split()
    starts = ["daemon-reload", "reset-failed", "enable", "restart"]
    assert orders == ([*starts, "disable"] if is_first else ["show", *starts, "disable", *starts])


@needs_systemctl
def test_its_logs_are_the_journals(home: Path, tmp_path: Path) -> None:
    assert install(home, tmp_path).status == 0
    (tmp_path / "journalctl").write_text('#!/bin/sh\necho "journal of $@"\n')
    (tmp_path / "journalctl").chmod(0o755)

    ended = mesh_llm(
        *("service", "logs", "-n", "7", "-f", "--home", home),
        env={"XDG_CONFIG_HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"},
    )

    name = unit_of(tmp_path).stem
    assert ended.stdout == f"journal of --user --unit {name} --lines 7 --no-pager --follow\n"


def test_homes_have_services_of_their_own(tmp_path: Path) -> None:
    names = {Service(home=home).name for home in (tmp_path / "a b", tmp_path / "a_b", Path("/x/a b"))}

    assert Service(home=Path("~/.mesh-llm").expanduser()).name == "mesh-llm"
    assert len(names) == 3
    assert all(name.startswith("mesh-llm-a-b-") for name in names)


def test_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        unit_text(Service(home=tmp_path, arguments=("--name", "a\nExecStartPre=/bin/x")))
    with pytest.raises(UsageError):
        environment_text({"MESH_LLM_API_KEY": "a\nLD_PRELOAD=x"})


def test_the_agent_for_launchd(tmp_path: Path) -> None:
    made = Service(home=tmp_path, arguments=("--port", "0"), folder=tmp_path)

    agent: dict[str, Any] = plistlib.loads(agent_text(made, tmp_path / "service.log"))

    assert agent["ProgramArguments"][3] == str(tmp_path / "service.env")
    assert agent["ProgramArguments"][4:] == made.command
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] == 75


@pytest.mark.full
def test_a_life_under_systemd(libraries: dict[str, Path], home: Path, tmp_path: Path) -> None:
    """Installed, killed, restarted, and stopped in good order when it is removed."""
    spaces = [
        "unshare",
        "--mount",
        "--propagation=private",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
    ]
    for name, missing in (
        ("a systemd", not SYSTEMD.exists()),
        ("namespaces", subprocess.run([*spaces, "true"], capture_output=True, check=False).returncode != 0),
    ):
        if missing:
            pytest.skip(f"there is no {name} here")
    model = write_model(tmp_path)
    argv: list[str | Path] = [*spaces, sys.executable, "-c", LIFE, SYSTEMD, home, model, *MESH_LLM]
    own = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path), "MESH_LLM_CACHE": str(cache_folder())}
    with Running(argv, env=own) as running:
        ended = running.wait(within_s=240)

    assert ended.status == 0, ended.stderr
    document = json.loads(ended.stdout.splitlines()[-1])
    if why := document.get("skipped"):
        pytest.skip(f"no systemd can be started here: {why}")
    first, second = document["first"], document["second"]
    assert (first["state"], first["enabled"], first["restarts"]) == ("active", True, 0)
    assert first["name"] in document["installed"]
    assert "s3cret" not in document["command_line"]
    assert second["pid"] != first["pid"]
    assert sorted(document["stopped"].split()) == ["ExecMainStatus=0", "Result=success"]
    assert document["removed"] == f"Removed {first['name']}\n"
    assert document["after"].startswith("Error: no service is installed for ")
    assert not (home / "service.env").exists()
