# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr doctor`` where it cannot measure: one clear line, and exit status 2.

The servers here are small ones of our own: they play another engine, or one that
fails. What vLLM does is tested on vLLM, in ``test_doctor_serve.py``.
"""

import datetime
import ipaddress
import signal
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from doctor_kit import (
    OtherEngine,
    closed_port,
    doctor,
    one_line,
    served,
    started,
    wait_for,
)


def fails(*words: object, env: dict[str, str] | None = None) -> str:
    """The one line that the doctor says when it ends with status 2."""
    run = doctor(*words, "--yes", env=env)
    assert run.status == 2, run.out
    return one_line(run.err)


# -- the URL ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://127.0.0.1:1", "not an HTTP URL"),
        ("127.0.0.1:8000", "not an HTTP URL"),
        ("http://", "not an HTTP URL"),
        ("http://[::1", "not a URL"),
        ("http://127.0.0.1:99999", "not a URL"),
        ("http://user:hunter2@127.0.0.1", "--api-key-env"),
        ("http://no-such-host.invalid:8000", "no host of that name"),
    ],
)
def test_wrong_url(url, says):
    line = fails("--url", url)
    assert says in line
    assert "hunter2" not in line


def test_nothing_listens():
    url = f"http://127.0.0.1:{closed_port()}"
    assert f"nothing answers at {url}" in fails("--url", url)


def test_not_an_openai_api():
    with served(OtherEngine()) as place:
        assert "no OpenAI API" in fails("--url", f"http://{place}/elsewhere")


def test_url_may_end_in_v1():
    with served(OtherEngine(fail="404")) as place:
        assert "answers 404" in fails("--url", f"http://{place}/v1/")


def test_no_server_and_no_file():
    assert "--url" in fails()
    both = fails("--url", "http://127.0.0.1:1", "--prometheus", "x")
    assert both == "doctor: give --url or --prometheus, not both"


@pytest.mark.parametrize("release", ["garbage!", ""])
def test_release_that_is_no_version(release, tmp_path):
    path = tmp_path / "metrics.txt"
    path.write_text(CONFIG.format(caching="True", more=""), encoding="utf-8")
    line = fails("--prometheus", path, "--release", release)
    assert line == f"doctor: --release {release!r} is no version"


def test_release_of_a_server_is_asked_for():
    line = fails("--url", "http://127.0.0.1:1", "--release", "0.32.0")
    assert "--release is for --prometheus: the server tells its own" in line


# -- TLS -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .issuer_name(name)
        .serial_number(1)
        .not_valid_after(now + datetime.timedelta(days=1))
        .subject_name(name)
        .not_valid_before(now - datetime.timedelta(days=1))
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(secret + made.public_bytes(pem))
    return path


def test_certificate_that_nobody_signed(certificate):
    with served(OtherEngine(), ssl_certfile=str(certificate)) as place:
        line = fails("--url", f"https://{place}")
        assert "TLS fails" in line and "CERTIFICATE_VERIFY_FAILED" in line
        assert "--ca-file" in line
        trusted = doctor("--url", f"https://{place}", "--yes", "--ca-file", certificate)
        assert "This is not vLLM" in trusted.out


def test_https_to_a_server_without_tls():
    with served(OtherEngine()) as place:
        assert "use http://" in fails("--url", f"https://{place}")


def test_http_to_a_server_with_tls(certificate):
    with served(OtherEngine(), ssl_certfile=str(certificate)) as place:
        fails("--url", f"http://{place}")


def test_no_certificates_in_the_file(tmp_path):
    empty = tmp_path / "empty.pem"
    empty.write_text("", encoding="utf-8")
    for path in (empty, tmp_path / "missing.pem"):
        line = fails("--url", "https://127.0.0.1:1", "--ca-file", path)
        assert f"cannot read certificates from {path}" in line


# -- key, model, context ---------------------------------------------------------------


def test_key_is_sent_and_never_printed():
    with served(OtherEngine(key="open-sesame", reports=True)) as place:
        url = f"http://{place}"
        assert "401" in fails("--url", url)
        wrong = fails("--url", url, "--api-key-env", "K", env={"K": "wrong-word"})
        assert "401" in wrong and "wrong-word" not in wrong
        run = doctor(
            *("--url", url, "--yes", "--api-key-env", "K"), env={"K": "open-sesame"}
        )
        assert "This is not vLLM" in run.out
        assert "open-sesame" not in run.out + run.err


@pytest.mark.parametrize(
    ("value", "says"), [("", "not set"), ("two words", "no key"), ("a\nb", "no key")]
)
def test_key_that_is_none(value, says):
    line = fails("--url", "http://127.0.0.1:1", "--api-key-env", "K", env={"K": value})
    assert says in line and "K" in line
    assert not value or value not in line


def test_model_that_is_not_served():
    with served(OtherEngine()) as place:
        line = fails("--url", f"http://{place}", "--model", "nobody")
        assert "'nobody'" in line and "other-model" in line


@pytest.mark.parametrize("context", ["abc", "4096", -1, True, [1]])
def test_context_that_is_no_number_is_unknown(context, tmp_path):
    with served(OtherEngine(context=context)) as place:
        run = doctor("--url", f"http://{place}", "--yes", json_file=tmp_path / "r.json")
    assert "model other-model" in run.out and " · context" not in run.out
    assert run.evidence.server.max_model_len is None


@pytest.mark.parametrize("models", [None, 5, "abc", {}, [5]])
def test_models_that_are_no_list(models):
    with served(OtherEngine(models=models)) as place:
        assert "no OpenAI API" in fails("--url", f"http://{place}")


def test_context_too_short_for_the_probe():
    with served(OtherEngine(context=256)) as place:
        line = fails("--url", f"http://{place}")
        assert "context of 256 tokens is too short" in line


def test_result_file_that_cannot_be_written(tmp_path):
    with served(OtherEngine()) as place:
        missing = tmp_path / "missing" / "result.json"
        for path in (missing, tmp_path):
            assert str(path) in fails("--url", f"http://{place}", "--json", path)


# -- servers that fail -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "after", "says"),
    [
        ("404", 0, "answers 404 for model 'other-model': no such model"),
        ("500", 3, "refuses the request (500): out of luck"),
        ("garbage", 0, "not an event of the OpenAI API"),
        ("error-event", 3, "the server stopped while the request ran: engine is gone"),
        ("die", 0, "the server closed the connection while a request ran"),
        ("die", 3, "the server closed the connection while a request ran"),
        ("hang", 3, "does not answer in time"),
    ],
)
def test_server_that_fails(fail, after, says, tmp_path):
    engine = OtherEngine(reports=True, fail=fail, fail_after=after)
    with served(engine) as place:
        run = doctor(
            *("--url", f"http://{place}", "--yes", "--timeout", 2),
            json_file=tmp_path / "result.json",
        )
    assert run.status == 2
    assert says in one_line(run.err)
    assert len(run.evidence.replies) == after
    assert "incomplete" in run.names("unsure")
    assert len(engine.asked) == after + 1


# -- another engine --------------------------------------------------------------------


def test_other_engine_that_tells_cached_tokens(tmp_path):
    engine = OtherEngine(context=8192, reports=True)
    with served(engine) as place:
        run = doctor("--url", f"http://{place}", "--yes", json_file=tmp_path / "r.json")
    assert run.status == 2
    assert run.names() == set()
    assert run.names("unsure") == {"other-engine"}
    evidence = run.evidence
    again = evidence.reply("A again")
    assert again.cached_tokens == again.prompt_tokens
    assert sum(r.prompt_tokens for r in evidence.replies) <= evidence.plan.bound_tokens
    assert len(engine.asked) <= evidence.plan.bound_requests
    assert "cannot see the pool's size" in run.out
    assert "seen: time to first token, cached tokens (usage)" in run.out


def test_other_engine_that_tells_nothing(tmp_path):
    with served(OtherEngine()) as place:
        run = doctor("--url", f"http://{place}", "--yes", json_file=tmp_path / "r.json")
    assert run.status == 2
    assert run.names() == set()
    assert run.names("unsure") == {"other-engine", "cached-unknown"}
    assert "time to first token: A " in run.out


def test_prompts_are_new_on_every_run():
    engine = OtherEngine()
    with served(engine) as place:
        for _ in range(2):
            doctor("--url", f"http://{place}", "--yes")
    half = len(engine.asked) // 2
    first, second = engine.asked[:half], engine.asked[half:]
    start = len("user: ") + 12
    assert {p[:start] for p in first}.isdisjoint(p[:start] for p in second)


# -- a saved file ----------------------------------------------------------------------

CONFIG = (
    'vllm:cache_config_info{{block_size="256",enable_prefix_caching="{caching}",'
    'num_gpu_blocks="20000",kv_cache_size_tokens="1000000"{more}}} 1.0\n'
)


def saved(tmp_path: Path, text: str, *words: object):
    path = tmp_path / "metrics.txt"
    path.write_text(text, encoding="utf-8")
    return doctor("--prometheus", path, *words, json_file=tmp_path / "saved.json")


def test_saved_file_with_caching_off(tmp_path):
    run = saved(tmp_path, CONFIG.format(caching="False", more=""))
    assert run.status == 1
    assert run.names() == {"caching-off"}


@pytest.mark.parametrize(
    ("more", "release", "finding"),
    [
        (',prefix_cache_retention_interval="None"', None, "session-flush"),
        (',prefix_cache_retention_interval="0"', None, "sparse-retention"),
        (',prefix_cache_retention_interval="4096"', None, "sparse-retention"),
        ("", "0.28.0", "session-flush"),
        ("", "0.22.1", "session-flush"),
        ("", "0.31.0", "sparse-retention"),
    ],
)
def test_saved_file_tells_what_the_interval_means(tmp_path, more, release, finding):
    words = ["--release", release] if release else []
    run = saved(tmp_path, CONFIG.format(caching="True", more=more), *words)
    assert run.status == 2  # nothing was measured
    assert run.names("unsure") == {finding, "not-measured"}


OLD_CONFIG = (  # as 0.23.0 reports it: without a capacity in tokens
    'vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",'
    'enable_prefix_caching="True",gpu_memory_utilization="0.9",'
    'num_gpu_blocks="300",prefix_cache_retention_interval="None"{more}}} 1.0\n'
)


@pytest.mark.parametrize("more", ["", ',kv_cache_size_tokens="None"'])
def test_saved_file_without_a_capacity(tmp_path, more):
    run = saved(tmp_path, OLD_CONFIG.format(more=more), "--release", "0.23.0")
    assert run.status == 2, run.err
    assert "pool 300 blocks · block 16 · interval None" in run.out
    assert run.names("unsure") == {"session-flush", "not-measured"}
    assert run.evidence.server.capacity_tokens is None


def test_saved_file_counts(tmp_path):
    counters = (
        'vllm:prefix_cache_queries_total{engine="0"} 1000\n'
        'vllm:prefix_cache_hits_total{engine="0"} 250\n'
        'vllm:num_preemptions_total{engine="0"} 3\n'
        'vllm:request_success_total{finished_reason="stop"} 20\n'
    )
    run = saved(tmp_path, CONFIG.format(caching="True", more="") + counters)
    assert run.status == 1
    assert run.names() == {"preemption"}
    assert "25.0% of 1000 prompt tokens" in run.out


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_saved_counter_that_is_no_number(tmp_path, value):
    counters = (
        f"vllm:prefix_cache_queries_total {value}\n"
        f"vllm:num_preemptions_total {value}\n"
        f"vllm:kv_cache_usage_perc {value}\n"
    )
    run = saved(tmp_path, CONFIG.format(caching="True", more="") + counters)
    assert run.status == 2
    assert run.names("unsure") == {"not-measured"}
    assert "since the start: no prompt" in run.out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no metric of vLLM"),
        ("up 1.0\n", "no metric of vLLM"),
        ("<html>\n", "no Prometheus text"),
    ],
)
def test_file_that_is_no_metrics(tmp_path, text, says):
    run = saved(tmp_path, text)
    assert run.status == 2
    assert says in one_line(run.err)
    missing = doctor("--prometheus", tmp_path / "missing")
    assert "cannot read" in one_line(missing.err)


# -- Ctrl-C ----------------------------------------------------------------------------


def test_interrupt_closes_the_connection():
    engine = OtherEngine(reports=True, fail="hang", fail_after=3)
    with served(engine) as place:
        with started("--url", f"http://{place}", "--yes") as process:
            wait_for(lambda: len(engine.asked) == 4)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 2, out + err
        assert "interrupted; the connection is closed" in one_line(err)
        assert "short prompt again" in out
        wait_for(lambda: engine.hung_up)
