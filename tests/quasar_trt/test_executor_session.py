"""Opening an engine directory of target tensorrt-llm: what is refused, in one line each, and how several ranks start."""

from __future__ import annotations

import atexit
import dataclasses
from types import SimpleNamespace

import pytest
from executor_double import executor_double
from llm_engines import change_description, write_llm_dir
from tiny import random_ids, tiny_checkpoint

from quasar_trt.engines import executor_session, open_engine
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.engines.tensorrt_llm import TensorRTLLMEngine
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.ranks import Leader, Open
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

MODEL = tiny_checkpoint(num_hidden_layers=2)
REFERENCE = ReferenceModel(*MODEL)


@pytest.fixture
def host(monkeypatch):
    """A machine with TensorRT-LLM and one GPU."""
    monkeypatch.setattr(executor_session, "llm_release", lambda: "1.2.1")
    monkeypatch.setattr(executor_session, "CudaDevice", lambda number: SimpleNamespace(sm=90, name="a double"))
    monkeypatch.setattr(executor_session.torch.cuda, "device_count", lambda: 1)
    with executor_double(REFERENCE) as bindings:
        yield SimpleNamespace(bindings=bindings)


@pytest.fixture
def engine_dir(tmp_path):
    return write_llm_dir(tmp_path / "engine", MODEL)


def set_sms(directory, *sms) -> None:
    manifest = Manifest.open(directory)
    dataclasses.replace(manifest, plan=dataclasses.replace(manifest.plan, sms=sms)).write(directory)


def test_runner_of_a_directory_gives_the_ids_of_the_reference_engine(host, engine_dir):
    prompts = [random_ids(REFERENCE.config, count, seed=count) for count in (2, 12)]
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = [
        each.outputs[0].token_ids for each in Runner(ReferenceEngine.from_dir(engine_dir)).generate(prompts, params)
    ]
    for drafter in (None, "suffix"):
        runner = Runner.from_dir(engine_dir, drafter=drafter)
        assert isinstance(runner.engine, TensorRTLLMEngine)
        assert [each.outputs[0].token_ids for each in runner.generate(prompts, params)] == expected
        assert runner.engine.weight_bytes_per_step == ReferenceEngine.from_dir(engine_dir).weight_bytes_per_step


def test_engine_that_trtllm_build_made_of_the_checkpoint_runs(host, engine_dir):
    dataclasses.replace(Manifest.open(engine_dir), plan=None).write(engine_dir)
    (output,) = Runner(open_engine(engine_dir)).generate([[1, 2]], SamplingParams(temperature=0, max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2


def test_executor_reuses_blocks_gives_logits_and_shuts_down_with_the_engine(host, engine_dir):
    engine = open_engine(engine_dir)
    executor = engine._executor
    cache, limits = executor.config.kv_cache_config, Manifest.open(engine_dir).limits
    assert cache.enable_block_reuse and executor.config.gather_generation_logits
    needed = limits.max_batch_size * (limits.max_seq_len + limits.max_draft_len)
    assert needed < cache.max_tokens <= needed + 64 * limits.max_batch_size and cache.free_gpu_memory_fraction == 0.9
    assert executor.can_enqueue_requests()
    del engine
    assert not executor.can_enqueue_requests()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "tensorrt_llm" / "config.json").unlink(), "ends with its checkpoint; where tensorrt-llm is installed"),
        (
            lambda d: change_description(d, None, version="1.0.0"),
            r"compiled by tensorrt-llm 1\.0\.0, 1\.2\.1 is installed .*pip install 'tensorrt-llm==1\.0\.0'",
        ),
        (lambda d: set_sms(d, 80, 86), "engines for SM 80, 86; this GPU, a double, is SM 90"),
        (lambda d: change_description(d, "build_config", max_batch_size=2), "max_batch_size 2; .* needs 8"),
        (lambda d: change_description(d, "build_config", max_seq_len=32), "max_seq_len 32; .* needs 64"),
        (
            lambda d: change_description(d, "build_config", max_draft_len=0),
            "max_draft_len 0; this engine directory needs 8: build the engine again",
        ),
        (
            lambda d: change_description(d, "build_config", plugin_config={"use_paged_context_fmha": False}),
            "use_paged_context_fmha False; this engine directory needs True",
        ),
        (lambda d: change_description(d, "pretrained_config", logits_dtype="float16"), "logits_dtype float16"),
        (lambda d: change_description(d, "pretrained_config", mapping={"tp_size": 1, "pp_size": 2}), "pp_size 2"),
        (lambda d: change_description(d, "pretrained_config", mapping=None), "no description of TensorRT-LLM's"),
        (lambda d: (d / "tensorrt_llm" / "rank0.engine").unlink(), "cannot be loaded: .*no engine"),
    ],
)  # fmt: skip
def test_engine_that_cannot_run_here_is_refused_in_one_line(host, engine_dir, monkeypatch, change, message):
    change(engine_dir)
    missing = RuntimeError("[TensorRT-LLM][ERROR] no engine\nat file.cpp:7")
    if "cannot be loaded" in message:
        monkeypatch.setattr(host.bindings, "Executor", lambda *arguments: (_ for _ in ()).throw(missing))
    with pytest.raises(QuasarError, match=message) as error:
        open_engine(engine_dir, engine="tensorrt_llm")
    assert "\n" not in str(error.value)


def test_directory_of_another_target_is_refused(host, engine_dir):
    dataclasses.replace(Manifest.open(engine_dir), target="cpu", plan=None).write(engine_dir)
    with pytest.raises(QuasarError, match="built for target 'cpu'; engine 'tensorrt_llm' runs target tensorrt-llm"):
        open_engine(engine_dir, engine="tensorrt_llm")


@pytest.mark.parametrize("engine", ["cpu", "tensorrt"])
def test_other_engines_refuse_the_directory(host, engine_dir, engine):
    with pytest.raises(QuasarError, match=f"built for target 'tensorrt-llm'.*engine '{engine}'"):
        open_engine(engine_dir, engine=engine)


def test_threads_are_refused(host, engine_dir):
    with pytest.raises(QuasarError, match="threads is 2; engine 'tensorrt_llm' has no use for it"):
        open_engine(engine_dir, threads=2)


def test_machine_without_tensorrt_llm_is_told_what_to_install(engine_dir):
    with pytest.raises(QuasarError, match=r"package tensorrt-llm is needed: not installed \(pip install"):
        open_engine(engine_dir)


def test_another_number_of_ranks_is_refused_with_both_numbers_and_the_command(host, tmp_path):
    directory = write_llm_dir(tmp_path / "two", MODEL, tp_size=2)
    with pytest.raises(QuasarError, match=r"tp_size 2, and this is a single process; .* mpirun -n 2"):
        open_engine(directory)


def test_each_rank_starts_an_executor_and_the_first_takes_requests(host, tmp_path, monkeypatch):
    directory = write_llm_dir(tmp_path / "two", MODEL, tp_size=2)
    model = SimpleNamespace(config=MODEL[0], recipe=MODEL[1])
    monkeypatch.setattr(executor_session.Checkpoint, "open", lambda path: model)
    with pytest.raises(QuasarError, match=r"rank 1 takes GPU 1 of its machine, which has 1; .*gpus_per_node"):
        TensorRTLLMEngine.from_dir(directory, SimpleNamespace(rank=1))
    monkeypatch.setattr(executor_session.torch.cuda, "device_count", lambda: 2)
    engines = []
    for rank in range(2):
        attributes = {"world_size": 2, "rank": rank}
        executor = type("Executor", (host.bindings.Executor,), attributes)
        with monkeypatch.context() as patch:
            patch.setattr(host.bindings, "Executor", executor)
            engines.append(TensorRTLLMEngine.from_dir(directory, ranks := SimpleNamespace(rank=rank)))
            assert engines[-1]._executor is None  # until all ranks have come so far
            engines[-1].join(ranks)
    assert [engine._executor.can_enqueue_requests() for engine in engines] == [True, False]
    (output,) = Runner(engines[0]).generate([[1, 2, 3]], SamplingParams(top_p=0.9, seed=1, max_tokens=3))
    assert len(output.outputs[0].token_ids) == 3
    logits = engines[0]._executor.requests[0].external_draft_tokens_config.logits
    assert logits.shape[1] == MODEL[0].vocab_size + 1  # the head's rows divide by two


def test_rank_that_cannot_load_its_engine_ends_all(host, engine_dir, monkeypatch):
    failed = []
    engine = TensorRTLLMEngine.from_dir(engine_dir, SimpleNamespace(rank=0))
    missing = RuntimeError("no memory\nat file.cpp:7")
    monkeypatch.setattr(host.bindings, "Executor", lambda *arguments: (_ for _ in ()).throw(missing))
    engine.join(SimpleNamespace(rank=0, fail=failed.append))
    assert [line.endswith("tensorrt_llm cannot be loaded: no memory; build the engine again") for line in failed] == [
        True
    ]


def test_program_of_several_ranks_gets_the_engine_itself(monkeypatch, engine_dir):
    """Its executors follow each other without ours."""
    monkeypatch.setattr(atexit, "register", lambda end: None)
    engine = SimpleNamespace(capabilities=SimpleNamespace(accepts_inside=True))
    monkeypatch.setattr(Open, "here", lambda order, ranks: (engine, 0))
    assert Leader(SimpleNamespace(announce=lambda told: None)).open(engine_dir, "tensorrt_llm", None) is engine
