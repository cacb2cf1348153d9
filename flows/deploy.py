"""Register the deployments of prefect.yaml with a Prefect server, with their work pools and optional notifications.

``PREFECT_API_URL=http://server:4200/api python -m flows.deploy``; without the address, the local server of this
checkout. ``--notify slack-webhook/engines`` names a notification block (`prefect block ls`) that reports failed runs
and targets for which no engine passed the gates. Run it again to update what is registered.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import yaml

from flows import local_server
from tasks.core.errors import ConfigError, EnginewrightError

if TYPE_CHECKING:
    from prefect.automations import AutomationCore
    from prefect.client.orchestration import SyncPrefectClient

DEPLOYMENTS = Path(__file__).resolve().parents[1] / "prefect.yaml"


class DeployFailed(EnginewrightError):
    """Prefect rejected the deployments."""


def pools() -> list[str]:
    """Return the work pools that the deployments name."""
    declared = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))["deployments"]
    return sorted({deployment["work_pool"]["name"] for deployment in declared})


def make_pools(client: "SyncPrefectClient") -> None:
    """Create the missing work pools; their workers start processes in their own checkout."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    for name in pools():
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
        print(f"work pool {name}: prefect worker start --pool {name} --limit 1")


def make_notifications(client: "SyncPrefectClient", block: str) -> None:
    """Report failed runs and failed gates through a notification block.

    Raises ConfigError if there is no such block.
    """
    from prefect.events.actions import SendNotification
    from prefect.exceptions import ObjectNotFound

    kind, _, name = block.partition("/")
    try:
        block_id = client.read_block_document_by_name(name, kind).id
    except (ObjectNotFound, ValueError):
        raise ConfigError(
            f"--notify is {block}, expected <type>/<name> of a notification block: `prefect block ls` lists them, "
            "the server's Blocks page creates them."
        ) from None
    for automation, subject, body in _automations():
        action = SendNotification(block_document_id=block_id, subject=subject, body=body)
        wanted = automation.model_copy(update={"actions": [action]})
        for old in client.read_automations_by_name(wanted.name):
            client.delete_automation(old.id)
        client.create_automation(wanted)
        print(f"automation {wanted.name}: {block}")


def _automations() -> "list[tuple[AutomationCore, str, str]]":
    from prefect.automations import AutomationCore
    from prefect.events.schemas.automations import EventTrigger

    from flows.run_page import GATE_FAILED_EVENT

    failed = EventTrigger(
        expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"},
        match_related={
            "prefect.resource.role": "flow",
            "prefect.resource.name": ["optimize", "deploy_target"],
        },
    )
    gate = EventTrigger(expect={GATE_FAILED_EVENT})
    return [
        (
            AutomationCore(name="enginewright: run failed", trigger=failed, actions=[]),
            "Enginewright: {{ flow.name }} failed",
            "{{ flow_run.name }} is {{ flow_run.state.name }}: {{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
        ),
        (
            AutomationCore(name="enginewright: no engine held the gates", trigger=gate, actions=[]),
            "Enginewright: no engine to ship",
            "{{ event.resource.id }}: {{ event.payload.reason }}",
        ),
    ]


def main(arguments: Sequence[str]) -> int:
    """Register everything and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.deploy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--notify", metavar="TYPE/NAME", help="a notification block")
    options = parser.parse_args(arguments)
    try:
        local_server.prepare_environment()
        local_server.begin_start()
        url = local_server.wait_until_ready()
        from prefect import get_client

        with get_client(sync_client=True) as client:
            make_pools(client)
            _register()
            if options.notify:
                make_notifications(client, options.notify)
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        print(
            f"The Prefect server at {url} stopped answering: {error}. Run the command again.", file=sys.stderr
        )
        return 1
    print(f"deployments: {url.removesuffix('/api')}/deployments")
    return 0


def _register() -> None:
    command = [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "deploy",
        "--all",
        "--prefect-file",
        str(DEPLOYMENTS),
    ]
    done = subprocess.run(command, cwd=DEPLOYMENTS.parent, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DeployFailed(f"`prefect deploy --all` failed: {(done.stderr or done.stdout).strip()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
