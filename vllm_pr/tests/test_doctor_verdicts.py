# SPDX-License-Identifier: Apache-2.0
"""From recorded evidence to verdicts.

``doctor_evidence`` holds evidence of real servers, as ``test_doctor_serve.py`` leaves
it under ``build/doctor``. Where a test needs what no server here can show (several
engines, EAGLE), it changes single figures of a recording and says which.
"""

import copy
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from vllm_pr.doctor import remedies, report, verdicts
from vllm_pr.doctor.errors import DoctorError
from vllm_pr.doctor.evidence import EDITED, Evidence, Server, from_json, to_json
from vllm_pr.doctor.metrics import describe, parse, parse_wanted
from vllm_pr.doctor.plan import longest_prompt, make_plan, rounds
from vllm_pr.doctor.verdicts import examine, exit_status
from vllm_pr.releases import known_releases

APPLY = "vllm-pr apply --python /path/to/python"
RECORDED = Path(__file__).with_name("doctor_evidence")


def recorded(name: str) -> Evidence:
    return from_json((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def names(evidence: Evidence, severity: str) -> set[str]:
    return {f.name for f in examine(evidence) if f.severity == severity}


@pytest.mark.parametrize(
    ("name", "faults", "unsure", "status"),
    [
        ("stock-none", {"session-flush"}, set(), 1),
        ("stock-0.28.0", {"session-flush"}, set(), 1),
        ("stock-default", {"sparse-retention"}, set(), 1),
        ("changed", set(), set(), 0),
        ("changed-full", set(), set(), 0),
        ("caching-off", {"caching-off"}, set(), 1),
        ("tiny-pool", {"capacity", "sparse-retention"}, set(), 1),
        ("template", {"template"}, set(), 1),
    ],
)
def test_each_server_has_its_verdict(name, faults, unsure, status):
    evidence = recorded(name)
    assert names(evidence, "fault") == faults
    assert names(evidence, "unsure") == unsure
    assert exit_status(examine(evidence)) == status


def test_evidence_survives_json():
    for path in RECORDED.glob("*.json"):
        evidence = recorded(path.stem)
        assert from_json(to_json(evidence)) == evidence


@pytest.mark.parametrize("name", [path.stem for path in RECORDED.glob("*.json")])
def test_each_server_can_be_shown_without_a_capacity(name):
    """As releases before 0.24.0, which report none."""
    evidence = recorded(name)
    evidence.server.capacity_tokens = None
    findings = examine(evidence)
    with (out := Console(file=io.StringIO())).capture() as shown:
        report.show_server(out, evidence.server)
        report.show_plan(out, evidence.server, evidence.plan, 270.0)
        report.show(out, evidence, findings)
    assert "None tokens" not in shown.get()
    assert b'"capacity_tokens": null' in report.as_json(evidence, findings)


def test_what_the_server_does_not_tell_is_left_out():
    server = recorded("stock-none").server
    server.model, server.max_model_len = "", None
    with (out := Console(file=io.StringIO())).capture() as shown:
        report.show_server(out, server)
    assert "model" not in shown.get() and "context" not in shown.get()


# -- the session switch ----------------------------------------------------------------


def test_flush_names_the_smallest_proof():
    finding = verdicts.session_flush(recorded("stock-none"))
    smallest = min(
        (s for s in recorded("stock-none").switches if verdicts.lost(s)),
        key=verdicts.total,
    )
    assert str(smallest.session_tokens) in finding.evidence[0]
    assert str(smallest.between_tokens) in finding.evidence[0]


def test_flush_needs_room_for_what_others_sent():
    """The same loss, with more of other clients in between than the pool holds."""
    evidence = recorded("stock-none")
    for switch in evidence.switches:
        switch.foreign_tokens, switch.foreign_requests = 20_000, 20
    evidence.traffic.requests = 20
    assert verdicts.session_flush(evidence) is None
    assert "crowded" in names(evidence, "unsure")
    assert names(evidence, "fault") == set()


def test_no_proof_without_enough_in_between():
    """A survived as on changed, but the target was ten times as far."""
    evidence = recorded("changed")
    evidence.plan.target_tokens *= 10
    assert names(evidence, "unsure") == {"not-provoked"}
    assert exit_status(examine(evidence)) == 2
    finding = verdicts.not_provoked(evidence)
    assert str(evidence.plan.target_tokens) in finding.remedy[0].run


def test_no_target_is_no_proof():
    """As on a release that does not report its capacity."""
    evidence = recorded("changed")
    evidence.plan.target_tokens = None
    assert names(evidence, "unsure") == {"not-provoked"}


def test_a_loss_without_room_is_capacity():
    """The long sessions of the small pool, on a server that kept its branches."""
    evidence = recorded("tiny-pool")
    finding = verdicts.capacity(evidence)
    assert finding.severity == "fault"
    evidence.switches[-1].foreign_tokens = 1
    assert verdicts.capacity(evidence).severity == "unsure"
    evidence.switches[-1].foreign_tokens = 0
    evidence.plan.target_tokens *= 10
    assert verdicts.capacity(evidence).severity == "unsure"


def test_what_the_doctor_itself_pushed_out_is_no_capacity_fault():
    """Its edits and branches took A's room; sessions as planned all survived."""
    evidence = recorded("tiny-pool")
    assert any(map(verdicts.lost, evidence.switches[:-1]))
    evidence.switches[-1].cached_after = evidence.switches[-1].cached_before
    assert names(evidence, "fault") == {"sparse-retention"}
    assert names(evidence, "unsure") == set()


def test_nothing_is_lost_without_a_figure():
    evidence = recorded("stock-none")
    for switch in evidence.switches:
        switch.cached_after = None
    assert verdicts.flushed(evidence) == []
    assert verdicts.capacity(evidence) is None


# -- resend, routing, restart ----------------------------------------------------------


def without_resend(name: str) -> Evidence:
    """A recording in which nothing ever hit."""
    evidence = recorded(name)
    for reply in evidence.replies:
        reply.cached_tokens = 0
    for switch in evidence.switches:
        switch.cached_before = switch.cached_after = 0
    return evidence


def test_resend_misses_with_eagle_on_0_29():
    """Resend 0 of 50,000 tokens: what the matrix measures on 0.29.0 with EAGLE."""
    evidence = without_resend("stock-default")
    evidence.server.version, evidence.server.spec_decode = "0.29.0", True
    assert names(evidence, "fault") == {"resend-misses"}
    runs = [remedy.run for remedy in verdicts.resend_misses(evidence).remedy]
    assert runs[0] == APPLY
    assert any("0.30.0" in run for run in runs)


def test_resend_misses_for_no_known_reason():
    evidence = without_resend("stock-default")
    finding = verdicts.resend_misses(evidence)
    assert finding.severity == "fault"
    assert "cache_salt" in finding.text


def test_a_changing_template_explains_the_resend():
    evidence = without_resend("stock-default")
    evidence.template.stable_in_time = False
    assert names(evidence, "fault") == {"template"}


def test_others_may_have_pushed_the_resend_out():
    evidence = without_resend("stock-default")
    again = evidence.reply("A again")
    again.foreign_tokens = 50_000
    assert names(evidence, "unsure") == {"crowded"}
    assert exit_status(examine(evidence)) == 2


def test_sessions_spread_over_engines():
    """Two engines behind one URL (data parallel), A on one and then on the other."""
    evidence = without_resend("stock-default")
    evidence.server.engines = 2
    for number, reply in enumerate(evidence.replies):
        reply.engines = [str(number % 2)]
    assert names(evidence, "fault") == {"routing"}
    assert "X-data-parallel-rank" in verdicts.routing(evidence).remedy[0].run


def test_one_engine_of_two_is_no_routing_fault():
    evidence = recorded("changed")
    evidence.server.engines = 2
    for reply in evidence.replies:
        reply.engines = ["1"]
    assert verdicts.routing(evidence) is None


def test_restart_in_the_middle():
    evidence = recorded("changed")
    evidence.traffic.restarted = True
    assert names(evidence, "unsure") == {"restarted"}


# -- retention, template, short prompts ------------------------------------------------


def test_sparse_retention_is_sure_when_the_edit_agrees():
    """The interval is not visible, as behind a proxy."""
    evidence = recorded("stock-default")
    evidence.server.interval = None
    assert verdicts.sparse_retention(evidence).severity == "fault"
    evidence.reply(EDITED).foreign_tokens = 1  # they may have taken its room
    assert verdicts.sparse_retention(evidence).severity == "unsure"
    evidence.replies.remove(evidence.reply(EDITED))
    assert verdicts.sparse_retention(evidence).severity == "unsure"


@pytest.mark.parametrize("version", ["0.25.1", "0.28.0"])
def test_an_edit_tells_a_full_pool_from_a_sparse_interval(version):
    """Releases that do not tell the interval: the environment may have set it."""
    evidence = recorded("changed-full")
    evidence.server.version, evidence.server.interval = version, None
    assert names(evidence, "fault") == set()
    assert names(evidence, "note") >= {"healthy", "full-pool"}
    evidence.reply(EDITED).cached_tokens = 256
    assert names(evidence, "fault") == {"sparse-retention"}
    runs = [remedy.run for remedy in verdicts.sparse_retention(evidence).remedy]
    assert runs[0].startswith("env -u VLLM_PREFIX_CACHE_RETENTION_INTERVAL ")


def test_a_full_pool_does_not_excuse_what_should_be_there():
    """A's end is there however full the pool is; so is A after other sessions."""
    evidence = recorded("changed-full")
    evidence.reply(EDITED).cached_tokens = 256
    assert names(evidence, "unsure") == {"full-pool"}
    evidence = recorded("changed-full")
    evidence.switches[-1].cached_after = 256
    assert names(evidence, "fault") == {"session-flush"}
    assert verdicts.full_pool(evidence) is None


@pytest.mark.parametrize("cached", [0, 1056])
def test_a_full_pool_keeps_what_was_asked_for(cached):
    """Not before 0.26: then it does not say so."""
    evidence = recorded("changed-full")
    evidence.reply("branch off A again").cached_tokens = cached
    text = verdicts.full_pool(evidence).text
    assert ("asked for" in text) is (cached > 0)


def test_what_every_prompt_begins_with_is_no_hit():
    """The template's 256 tokens hit on A as well: they say nothing about an edit."""
    evidence = recorded("stock-default")
    evidence.server.interval = None
    edited = evidence.reply(EDITED)
    edited.shared_tokens = 400
    assert edited.cached_tokens == evidence.reply("A").cached_tokens == 256
    assert verdicts.dense_checkpoints(evidence) is False
    edited.shared_tokens = 260
    assert verdicts.dense_checkpoints(evidence) is None


def test_other_clients_fill_the_pool_too():
    """On changed their requests may take the room of checkpoints, A's end included."""
    evidence = recorded("changed-full")
    for reply in evidence.replies:
        reply.foreign_tokens = 10_000
    evidence.reply(EDITED).cached_tokens = 256
    assert names(evidence, "note") >= {"healthy", "full-pool"}


def test_branches_that_others_pushed_out_prove_nothing():
    evidence = recorded("stock-default")
    for name in verdicts.PARTIAL:
        evidence.reply(name).foreign_tokens = 50_000
    assert verdicts.sparse_retention(evidence) is None
    assert exit_status(examine(evidence)) == 2


def test_later_traffic_does_not_hide_a_lost_branch():
    evidence = recorded("stock-default")
    evidence.traffic.tokens = evidence.reply("A after B").foreign_tokens = 50_000
    assert names(evidence, "fault") == {"sparse-retention"}


@pytest.mark.parametrize(
    ("kept", "answer_kept", "severity"),
    [
        (0, None, "fault"),
        (-33, None, "fault"),
        (-32, None, "note"),
        (None, False, "note"),
    ],
)
def test_template_counts_from_one_alignment_on(kept, answer_kept, severity):
    """``kept`` is how many tokens stayed, counted from the end where negative."""
    evidence = recorded("changed")
    template = evidence.template
    if kept is not None:
        template.kept_tokens = kept % template.previous_tokens
    template.answer_kept = answer_kept
    assert verdicts.template_unstable(evidence).severity == severity


def test_template_is_suspected_without_a_tokenizer():
    evidence = recorded("template")
    evidence.template = None
    turn = evidence.reply("conversation, turn 2")
    turn.shared_tokens = evidence.reply("conversation, turn 1").prompt_tokens
    assert names(evidence, "unsure") == {"template"}


def test_short_prompts_are_a_fault_only_for_who_sends_them():
    """A short prompt of 27 tokens, below the alignment of 32."""
    evidence = recorded("changed")
    for name in ("short prompt", "short prompt again"):
        reply = evidence.reply(name)
        reply.prompt_tokens, reply.cached_tokens = 27, 0
    assert verdicts.short_prompts(evidence).severity == "note"
    assert exit_status(examine(evidence)) == 0
    evidence.plan.short_wanted = True
    assert verdicts.short_prompts(evidence).severity == "fault"
    assert "32 tokens" in verdicts.short_prompts(evidence).text


# -- no proof of health ----------------------------------------------------------------


@pytest.mark.parametrize("name", verdicts.MUST_HIT)
def test_healthy_needs_every_probe(name):
    """Whatever is left out or misses, the run is no proof of health."""
    evidence = recorded("changed")
    missing = copy.deepcopy(evidence)
    missing.replies = [r for r in missing.replies if r.name != name]
    assert exit_status(examine(missing)) != 0
    evidence.reply(name).cached_tokens = 0
    if name in verdicts.PARTIAL and name != EDITED:
        assert "full-pool" in names(evidence, "note")
    else:
        assert exit_status(examine(evidence)) != 0


def test_a_run_that_ended_early_is_no_proof():
    evidence = recorded("changed")
    evidence.stopped = "the server closed the connection"
    assert names(evidence, "unsure") == {"incomplete"}


def test_a_probe_left_out_for_time_is_no_proof():
    evidence = recorded("changed")
    evidence.skipped = ["growing conversation: 4096 tokens at 10 tokens/s"]
    assert names(evidence, "unsure") == {"incomplete"}


# -- sizes -----------------------------------------------------------------------------


def serving(**kwargs) -> Server:
    """A server as large as in production: 20,000 blocks of 256 tokens."""
    known = {
        "engine": "vllm",
        "version": "0.32.0",
        "metrics": True,
        "tokenizer": True,
        "max_model_len": 262_144,
        "blocks": 20_000,
        "block_size": 256,
        "capacity_tokens": 1_160_000,
        "alignment": 256,
        "interval": "None",
    }
    return Server("http://127.0.0.1:8000", **{**known, **kwargs})


def fits(server: Server) -> int | None:
    return Evidence(server).fits_tokens


def test_plan_turns_the_list_over_inside_what_fits():
    server = serving()
    plan = make_plan(server, 20, fits(server), switch_tokens=2_000_000)
    assert plan.target_tokens == int(0.75 * 1_160_000) - plan.session_tokens
    assert rounds(plan)[0] == plan.session_tokens
    assert rounds(plan)[-1] == plan.target_tokens
    assert plan.session_tokens + rounds(plan)[-1] < 0.9 * 1_160_000


def test_plan_is_bounded_where_nobody_asked_for_more():
    plan = make_plan(serving(), 20, fits(serving()))
    assert plan.switch_tokens == 262_144 < plan.target_tokens
    assert plan.bound_tokens < 600_000


def test_plan_for_one_kind_of_layers_or_interval_0_is_one_switch():
    for server in (serving(dense_group_only=True), serving(interval=0)):
        plan = make_plan(server, 20, fits(server))
        assert rounds(plan) == [plan.session_tokens] == [plan.target_tokens]


def test_plan_takes_the_operators_length():
    plan = make_plan(serving(), 20, fits(serving()), prompt_tokens=100_000)
    assert plan.session_tokens == 100_000
    small = serving(max_model_len=262_144, capacity_tokens=300_000)
    plan = make_plan(small, 20, fits(small), prompt_tokens=200_000)
    assert plan.session_tokens == 90_000  # what certainly fits beside others
    assert plan.long_tokens == 200_000


def test_plan_says_what_does_not_fit():
    server = serving(max_model_len=2_000)
    with pytest.raises(DoctorError, match="does not fit"):
        make_plan(server, 20, fits(server), prompt_tokens=2_000)
    with pytest.raises(DoctorError, match="too small"):
        make_plan(server, 20, fits(server), prompt_tokens=21)
    server = serving(max_model_len=1_000)
    with pytest.raises(DoctorError, match="context of 1000 tokens is too short"):
        make_plan(server, 20, fits(server))


@pytest.mark.parametrize("context", [1_100, 4_096, 32_768, 262_144])
@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize("capacity", [None, 1.0, 1.7, 50.0])
def test_plan_never_exceeds_the_context(context, tokenizer, capacity):
    server = serving(
        max_model_len=context,
        tokenizer=tokenizer,
        capacity_tokens=capacity and int(capacity * context),
    )
    if longest_prompt(server) < 1_044:
        pytest.raises(DoctorError, make_plan, server, 20, fits(server))
        return
    plan = make_plan(server, 20, fits(server))
    for size in (plan.session_tokens, plan.part_tokens, plan.long_tokens):
        assert size <= longest_prompt(server) < context
    assert sum(rounds(plan)) < plan.bound_tokens


# -- metrics, releases -----------------------------------------------------------------

METRICS = """
process_start_time_seconds 1796044262.5
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 40.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",\
effective_attention_block_size="None",kv_cache_size_tokens="15990",num_gpu_blocks="1000",\
prefix_cache_retention_interval="None"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0
"""


@pytest.mark.parametrize("read", [parse, parse_wanted])
def test_metrics(read):
    snapshot = read(METRICS)
    assert snapshot.vllm and snapshot.spec_decode
    assert snapshot.usage == 0.5
    assert snapshot.total["queries"] == 140
    assert snapshot.total["finished"] == 7
    assert snapshot.engines == 2
    assert snapshot.started == 1796044262.5
    assert snapshot.moved(read(METRICS.replace(" 40.0", " 30.0"))) == ["1"]
    server = Server("http://127.0.0.1:8000")
    describe(snapshot, server)
    assert server.interval == "None"
    assert server.caching is True
    assert server.block_size == 16
    assert server.dense_group_only is True


def test_not_vllm():
    assert not parse('sglang:cache_hit_rate{model="m"} 0.5\n').vllm


@pytest.mark.parametrize("release", [r.version for r in known_releases()])
def test_every_release_has_a_remedy_for_its_faults(release):
    server = Server("http://127.0.0.1:8000", engine="vllm", version=release)
    found = remedies.release_of(server)
    assert found.version == release
    assert remedies.by_release(server, "session_switch")
    if found.first_branch == "lost":
        assert remedies.by_release(server, "first_branch")
    if found.eagle_resend == "lost":
        assert remedies.by_release(server, "eagle_resend")
    assert remedies.dense_checkpoints(server) is (found.first_branch == "kept")
    assert release in remedies.facts_line(server)


def test_a_build_between_releases_is_treated_as_the_one_before():
    server = Server("u", engine="vllm", version="0.32.1.dev7+g1234567")
    assert remedies.release_of(server).version == "0.32.0"
    assert "the nearest known release, 0.32.0" in remedies.facts_line(server)
    run = remedies.by_release(server, "session_switch")[0].run
    assert run == f"{APPLY} --force-release 0.32.0"
    assert remedies.by_release(server, "session_switch")[1].run.endswith("interval 0")


def test_a_local_part_is_the_release_itself():
    server = Server("u", engine="vllm", version="0.32.0+cpu")
    assert remedies.by_release(server, "session_switch")[0].run == APPLY


def test_upgrade_is_to_a_release_that_keeps_sessions_and_resends():
    server = Server("u", engine="vllm", version="0.28.0")
    assert remedies.keep_sessions(server)[-1].run == "pip install 'vllm>=0.30.0'"


def test_unknown_versions_still_get_a_remedy():
    for version in (None, "unknown", "0.1.0"):
        server = replace(serving(), version=version)
        assert remedies.by_release(server, "session_switch")[0].run == APPLY


def test_json_of_a_finding_is_plain():
    content = json.loads(to_json(recorded("changed")))
    assert content["server"]["model"] == "gemma3-tiny"
