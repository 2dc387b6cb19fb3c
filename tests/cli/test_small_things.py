"""What people meet first: Ctrl-C during the imports, a pipe that closes, help, names nearly right, narrow screens."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.main import get_command
from typer.testing import CliRunner

import autoshard
from autoshard.cli.main import app
from autoshard.cluster.parse import canonical_name, parse_devices
from autoshard.errors import SpecError
from autoshard.report.compared import print_comparison
from tests.scripts import run_script

COMMANDS = sorted(get_command(app).commands)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_an_interrupt_ends_a_command_without_a_traceback(seconds, tmp_path):
    slow = tmp_path / "model.py"
    slow.write_text("import time, torch\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "autoshard", "plan", str(slow)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, problems = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in problems + out


ENDS = """
import os, sys
from autoshard.cli.main import run

def ended(stdout, *asked):
    child = os.fork()
    if not child:
        os.dup2(stdout, 1)
        sys.argv[1:] = asked
        run()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

reader, writer = os.pipe()
os.close(reader)
gone = ended(writer, "devices", "--known", "--json")
print("gone", gone, file=sys.stderr)
print("full", ended(os.open("/dev/full", os.O_WRONLY), "--help"), file=sys.stderr)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_reader_that_goes_away_is_no_error_and_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    done = run_script(tmp_path / "ends.py")
    gone, error, full = done.stderr.splitlines()
    assert gone == f"gone {-signal.SIGPIPE}"
    assert error.startswith("Error: cannot write the output: No space left") and full == "full 1"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_whole_names_and_no_types_of_flags(command):
    shown = CliRunner().invoke(app, [command, "--help"], prog_name="autoshard").output
    assert "<bool>" not in shown and "…" not in shown and "[[" not in shown
    if command in ("plan", "verify", "report"):
        assert "--assume-independent-rows" in shown


def test_the_list_of_commands_has_whole_sentences():
    shown = CliRunner().invoke(app, ["--help"], prog_name="autoshard").output.partition("Commands:")[2]
    assert "..." not in shown and "Nothing is allocated." in " ".join(shown.split())
    version = CliRunner().invoke(app, ["--version"]).stdout
    assert version.strip() == f"autoshard {autoshard.__version__}"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("cuda0", "cuda:0"), ("cuda-1", "cuda:1"), ("cdua:1", "cuda:1"), ("CUDA:0", "cuda:0"), ("cpu0", "cpu")],
)
def test_a_device_nearly_named_is_answered_with_its_name(given, meant):
    for refused in (parse_devices, canonical_name, lambda name: parse_devices({name: "1GiB"})):
        with pytest.raises(SpecError, match=f"is not a device name. Did you mean {meant}\\?"):
            refused(given)


def test_names_of_strategies_stay_whole_in_80_columns():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(4, 8)
    found = autoshard.compare(model, "2x1MiB", inputs=x)
    written = io.StringIO()
    print_comparison(Console(file=written, width=80, color_system=None), found, title="model.py")
    text = written.getvalue()
    assert "Accelerate balanced_low_0" in text and "column-parallel  torchrun" in text
