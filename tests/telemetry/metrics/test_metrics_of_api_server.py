"""The metrics page in the API process: on unless disabled, behind the API key unless opened."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing

import pytest
from starlette.testclient import TestClient
from tests.telemetry.metrics.scripted import ScriptedEngine, wait_for

from kvscope_engine.cli.main import main
from kvscope_engine.http.api_state import HttpSettings
from kvscope_engine.http.http_child import HttpChild
from kvscope_engine.http.http_server import make_app, metrics_route
from kvscope_telemetry.metrics.metrics_page import PATH, MetricsPage
from kvscope_telemetry.transport.connections import NO_KEY

Start = Callable[..., ScriptedEngine]


def get(address: str) -> tuple[int, str]:
    """Return status and body, or status 0 while nothing listens."""
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
    except OSError:
        return 0, ""


@pytest.mark.parametrize(
    ("options", "status"),
    [([], 200), (["--served-model-name", "other"], 200), (["--no-metrics"], 404)],
)
def test_api_process_serves_the_metrics_of_its_engine_unless_disabled(
    endpoint: str, start_engine: Start, options: list[str], status: int
) -> None:
    start_engine()
    child = HttpChild("127.0.0.1:0", api_key="", options=options, report=lambda line: None)
    with child.running(endpoint, NO_KEY):
        wait_for(lambda: get(f"{child.url}/version")[0] == 200, "an API that answers")
        assert get(child.url + PATH)[0] == status
        if status == 200:
            model = "other" if options else "scripted"
            labels = f'{{engine="0",model_name="{model}"}}'
            wait_for(lambda: f"kvscope_steps_total{labels} 0.0" in get(child.url + PATH)[1], "an engine that is seen")


@pytest.mark.parametrize(
    ("api_key", "is_open", "shown", "status"),
    [
        ("", False, "", 200),
        ("secret", False, "", 401),
        ("secret", False, "wrong", 401),
        ("secret", False, "secret", 200),
        ("secret", True, "", 200),
    ],
)
def test_metrics_need_the_api_key_unless_opened(
    endpoint: str, api_key: str, is_open: bool, shown: str, status: int
) -> None:
    settings = HttpSettings(endpoint=endpoint, api_key=api_key, open_paths=frozenset((PATH,) if is_open else ()))
    with closing(MetricsPage(endpoint)) as page:
        app = make_app(settings, [metrics_route(page)])
        client = TestClient(app, base_url="http://localhost")
        try:
            headers = {"Authorization": f"Bearer {shown}"} if shown else {}
            answer = client.get(PATH, headers=headers)
            assert answer.status_code == status
            if status == 200:
                assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
                assert "kvscope_up 0.0" in answer.text  # there is no engine
                openmetrics = {**headers, "Accept": "application/openmetrics-text; version=1.0.0"}
                assert client.get(PATH, headers=openmetrics).text.endswith("# EOF\n")
                assert client.post(PATH, headers=headers).status_code == 405
        finally:
            client.close()
            app.state.api.engine_client.close()
            app.state.api.tokenizer_threads.close()


def test_contradictory_metrics_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--no-metrics"]) == 2
    assert "--http" in capsys.readouterr().err
    assert main(["serve", "--http", "127.0.0.1:0", "--no-metrics", "--metrics-open"]) == 2


def test_dashboard_command_prints_the_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("{")
    assert main(["dashboard", "--path"]) == 0
    with open(capsys.readouterr().out.strip(), encoding="utf-8") as file:
        assert file.read() == text


def test_command_line_imports_no_server_libraries() -> None:
    code = (
        "import sys; from kvscope_engine.cli.main import build_parser; build_parser();"
        " assert not {'prometheus_client', 'starlette', 'torch'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
