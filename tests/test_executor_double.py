"""The double of TensorRT-LLM's executor, held to what is known of the real one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from executor_double import FinishReason, Misuse, executor_double, executor_module, write_llm_engine
from tiny import random_ids, tiny_checkpoint

from quasar_trt.engines.reference import ReferenceModel

MODEL = ReferenceModel(*tiny_checkpoint(num_hidden_layers=2))
PROMPT = random_ids(MODEL.config, 9)
trt = executor_module(MODEL)


def greedy(prompt, count):
    """What the model emits greedily after the prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(MODEL(ids)[-1].argmax()))
    return ids[len(prompt) :]


CHAIN = greedy(PROMPT, 12)


def executor(tmp_path, max_draft_len=3, reuse=True, **build):
    directory = write_llm_engine(tmp_path / "engine", max_draft_len=max_draft_len, **build)
    config = trt.ExecutorConfig(
        kv_cache_config=trt.KvCacheConfig(enable_block_reuse=reuse), gather_generation_logits=True
    )
    return trt.Executor(directory, trt.ModelType.DECODER_ONLY, config)


def drafted(*tokens, prompt=PROMPT, max_tokens=None, **options):
    config = trt.ExternalDraftTokensConfig(list(tokens), options.pop("logits", None))
    return request(prompt, max_tokens or len(tokens) + 1, external_draft_tokens_config=config, **options)


def request(prompt=PROMPT, max_tokens=4, **options):
    output = options.pop("output", {})
    return trt.Request(
        list(prompt),
        max_tokens,
        sampling_config=trt.SamplingConfig(**options.pop("sampling", {"top_k": 1})),
        output_config=trt.OutputConfig(exclude_input_from_output=True, **output),
        **options,
    )


def answer(executor, request):
    (response,) = executor.await_responses(executor.enqueue_request(request))
    return response


def result(executor, request):
    response = answer(executor, request)
    assert not response.has_error(), response.error_msg
    (ids,), (reason,) = response.result.output_token_ids, response.result.finish_reasons
    assert response.result.is_final
    return ids, reason


def test_a_drafted_request_verifies_once_and_ends(tmp_path):
    run = executor(tmp_path)
    ids, reason = result(run, drafted(CHAIN[0], CHAIN[1], 5, max_tokens=20))
    assert (ids, reason) == (CHAIN[:3], FinishReason.NOT_FINISHED)
    assert run.passes == [[(len(PROMPT), 3)]]


def test_a_wrong_first_draft_token_leaves_the_targets_own(tmp_path):
    assert result(executor(tmp_path), drafted((CHAIN[0] + 1) % 131, CHAIN[1]))[0] == CHAIN[:1]


def test_all_draft_tokens_and_one_more_end_by_length(tmp_path):
    assert result(executor(tmp_path), drafted(*CHAIN[:3])) == (CHAIN[:4], FinishReason.LENGTH)


def test_a_request_without_draft_tokens_runs_to_max_tokens(tmp_path):
    run = executor(tmp_path)
    assert result(run, request(max_tokens=7)) == (CHAIN[:7], FinishReason.LENGTH)
    assert len(run.passes) == 7


def test_requests_are_batched_in_flight(tmp_path):
    run = executor(tmp_path, max_batch_size=2)
    ids = run.enqueue_requests([request(max_tokens=3), drafted(*CHAIN[:2]), request(max_tokens=1)])
    responses = [response for (response,) in run.await_responses(ids)]
    assert [response.result.output_token_ids[0] for response in responses] == [CHAIN[:3], CHAIN[:3], CHAIN[:1]]
    assert run.passes == [[(9, 0), (9, 2)], [(1, 0), (9, 0)], [(1, 0)]]


def test_the_end_id_ends_a_request_and_is_not_among_its_output(tmp_path):
    end = CHAIN[4]
    first = CHAIN.index(end)
    run = executor(tmp_path)
    assert result(run, request(max_tokens=12, end_id=end)) == (CHAIN[:first], FinishReason.END_ID)
    accepted = drafted(*CHAIN[:2], end_id=CHAIN[1])
    assert result(run, accepted) == (CHAIN[: CHAIN.index(CHAIN[1])], FinishReason.END_ID)


def test_a_stop_word_is_among_the_output(tmp_path):
    assert result(executor(tmp_path), request(max_tokens=12, stop_words=[CHAIN[1:3]])) == (
        CHAIN[:3],
        FinishReason.STOP_WORDS,
    )


def test_the_output_starts_with_the_prompt_unless_it_is_excluded(tmp_path):
    plain = trt.Request(PROMPT, 2, sampling_config=trt.SamplingConfig(top_k=1))
    assert result(executor(tmp_path), plain)[0] == PROMPT + CHAIN[:2]


def test_streaming_gives_each_token_by_itself(tmp_path):
    run = executor(tmp_path)
    request_id = run.enqueue_request(request(max_tokens=3, streaming=True))
    parts = [run.await_responses(request_id) for _ in range(3)]
    assert [[r.result.output_token_ids[0] for r in part] for part in parts] == [[[token]] for token in CHAIN[:3]]
    assert [part[-1].result.is_final for part in parts] == [False, False, True]
    with pytest.raises(RuntimeError, match="answered already"):
        run.await_responses(request_id)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (drafted(1, 2, 3, 4), r"Draft tokens length \(4\) exceeds maximum draft tokens length \(3\)"),
        (request([1] * 67), r"Prompt length \(67\) exceeds maximum input length \(66\)"),
        (drafted(1, logits=torch.zeros(1, 130)), "draft logits of 130 columns, vocabulary 131"),
        (drafted(1, logits=torch.zeros(1, 131).half()), "another type"),
        (request(sampling={"beam_width": 2}), "beam width"),
    ],
)
def test_a_request_that_cannot_run_is_answered_with_an_error(tmp_path, wrong, message):
    response = answer(executor(tmp_path), wrong)
    assert response.has_error()
    with pytest.raises(RuntimeError, match=message):
        _ = response.result


def test_drafts_need_an_engine_built_for_them(tmp_path):
    assert "not built for external" in answer(executor(tmp_path, max_draft_len=0), drafted(1)).error_msg


def test_an_engine_for_drafts_needs_block_reuse_and_reuse_needs_paged_context(tmp_path):
    with pytest.raises(RuntimeError, match="KV cache block reuse must be enabled"):
        executor(tmp_path, reuse=False)
    with pytest.raises(RuntimeError, match="paged context FMHA"):
        executor(tmp_path, plugin_config={"use_paged_context_fmha": False, "tokens_per_block": 32})


def test_another_version_or_world_size_is_refused(tmp_path):
    directory = write_llm_engine(tmp_path, tp_size=2)
    with pytest.raises(RuntimeError, match=r"mpiSize == tp \* pp \* cp: 1 and 2"):
        trt.Executor(directory, trt.ModelType.DECODER_ONLY, trt.ExecutorConfig())
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"version": "1.0.0"}))
    with pytest.raises(RuntimeError, match=r"1\.0\.0"):
        trt.Executor(directory, trt.ModelType.DECODER_ONLY, trt.ExecutorConfig())


def test_only_the_leader_enqueues(tmp_path):
    follower = executor_module(MODEL, rank=1, world_size=2)
    run = follower.Executor(
        write_llm_engine(tmp_path, tp_size=2), trt.ModelType.DECODER_ONLY, follower.ExecutorConfig()
    )
    assert not run.can_enqueue_requests()
    with pytest.raises(RuntimeError, match="leader"):
        run.enqueue_request(request())


@pytest.mark.parametrize(
    "values",
    [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": -1.0}, {"repetition_penalty": 0.0}, {"min_p": 2.0}],
)
def test_settings_out_of_range_raise_where_they_are_made(values):
    with pytest.raises(RuntimeError):
        trt.SamplingConfig(**values)


def test_a_seed_is_unsigned_and_64_bits():
    for seed in (-1, 2**64, 0.5):
        with pytest.raises(TypeError):
            trt.SamplingConfig(seed=seed)


@pytest.mark.parametrize("sampling", [{"min_p": 0.1, "top_p": 1.0}, {"top_k": 2000}])
def test_what_the_real_executor_would_change_silently_is_a_misuse(tmp_path, sampling):
    with pytest.raises(Misuse):
        answer(executor(tmp_path), request(sampling=sampling))


def test_a_draft_past_the_longest_input_is_a_misuse(tmp_path):
    with pytest.raises(Misuse, match="dropped"):
        answer(executor(tmp_path), drafted(1, 2, prompt=[1] * 65))


def test_max_tokens_is_cut_where_the_sequence_would_grow_too_long(tmp_path):
    ids, reason = result(executor(tmp_path, max_draft_len=0), request([1] * 60, max_tokens=50))
    assert (len(ids), reason) == (4, FinishReason.LENGTH)


def test_without_top_k_and_top_p_a_request_is_greedy(tmp_path):
    assert result(executor(tmp_path), request(sampling={"temperature": 5.0, "seed": 3}))[0] == CHAIN[:4]


def test_a_seed_decides_the_ids_and_none_is_seed_0(tmp_path):
    run = executor(tmp_path)

    def sampled(**seed):
        return result(run, request(max_tokens=8, sampling={"top_p": 1.0, "temperature": 2.0} | seed))[0]

    assert sampled(seed=7) == sampled(seed=7) != sampled(seed=8)
    assert sampled() == sampled(seed=0)


def test_min_tokens_keeps_the_end_id_away(tmp_path):
    wanted = request(max_tokens=3, end_id=CHAIN[0], sampling={"top_k": 1, "min_tokens": 2})
    assert len(result(executor(tmp_path), wanted)[0]) >= 2


def test_bias_and_bad_words_change_every_verified_row(tmp_path):
    run = executor(tmp_path)
    bias = torch.zeros(131)
    bias[CHAIN[1]] = -100
    assert result(run, drafted(*CHAIN[:3], embedding_bias=bias))[0][1] != CHAIN[1]
    assert result(run, drafted(*CHAIN[:3], bad_words=[CHAIN[:2]]))[0][1] != CHAIN[1]


def test_generation_logits_of_a_draft_cover_the_emitted_rows(tmp_path):
    run = executor(tmp_path)
    response = answer(run, drafted(CHAIN[0], 5, 6, output={"return_generation_logits": True}))
    count = len(response.result.output_token_ids[0])
    logits = response.result.generation_logits
    assert count == 2 and logits.shape == (1, 2, 131)
    torch.testing.assert_close(logits[0], MODEL([*PROMPT, CHAIN[0]])[-2:], atol=1e-4, rtol=1e-4)
    assert answer(run, drafted(CHAIN[0])).result.generation_logits is None


def test_generation_logits_without_a_draft_have_max_tokens_rows(tmp_path):
    run = executor(tmp_path)
    wanted = request(max_tokens=6, end_id=CHAIN[2], output={"return_generation_logits": True})
    logits = answer(run, wanted).result.generation_logits
    assert logits.shape == (1, 6, 131)
    assert not logits[0, CHAIN.index(CHAIN[2]) :].any()


def test_generation_logits_need_an_executor_that_gathers_them(tmp_path):
    config = trt.ExecutorConfig(kv_cache_config=trt.KvCacheConfig(enable_block_reuse=True))
    run = trt.Executor(write_llm_engine(tmp_path), trt.ModelType.DECODER_ONLY, config)
    assert "gather_generation_logits" in answer(run, request(output={"return_generation_logits": True})).error_msg


def test_a_resubmitted_prefix_brings_only_what_no_whole_block_holds(tmp_path):
    run = executor(tmp_path, plugin_config={"use_paged_context_fmha": True, "tokens_per_block": 4})
    prompt = PROMPT
    for start in (0, 4):
        ids, _ = result(run, drafted(*CHAIN[start : start + 3], prompt=prompt))
        prompt = prompt + ids
    assert prompt == PROMPT + CHAIN[:8]
    assert run.passes == [[(9, 3)], [(1, 3)]]


def shares(run, draft, logits, count=500):
    """How often each token comes first, over seeds."""
    counts = np.zeros(131)
    for seed in range(count):
        sampling = {"top_k": 2, "temperature": 8.0, "seed": seed}
        counts[result(run, drafted(draft, sampling=sampling, logits=logits))[0][0]] += 1
    return counts / count


def test_above_temperature_0_only_one_hot_draft_logits_keep_the_distribution(tmp_path):
    best = MODEL(PROMPT)[-1].topk(2)
    p = float((best.values / 8).softmax(0)[1])
    draft = int(best.indices[1])
    one_hot = torch.full((1, 131), -1e4)
    one_hot[0, draft] = 0
    run = executor(tmp_path)
    # 500 runs: the standard deviation of a share is below .023
    assert abs(shares(run, draft, one_hot)[draft] - p) < 0.08
    assert abs(shares(run, draft, None)[draft] - (p + (1 - p) * p)) < 0.08
    assert (1 - p) * p > 0.2


def test_a_cancelled_request_is_answered(tmp_path):
    run = executor(tmp_path)
    request_id = run.enqueue_request(request(max_tokens=8))
    run.cancel_request(request_id)
    (response,) = run.await_responses(request_id)
    assert response.result.finish_reasons == [FinishReason.CANCELLED]


def test_the_package_can_be_imported_while_the_double_lasts():
    with executor_double(MODEL) as bindings:
        import tensorrt_llm
        from tensorrt_llm.bindings import executor

        assert executor is bindings
        assert tensorrt_llm.__version__ == "1.2.1"
