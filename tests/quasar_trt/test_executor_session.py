"""Opening an engine directory of target tensorrt-llm: what is refused, in one line each, and how several ranks start."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
from executor_double import executor_double
from llm_engines import change_description, write_llm_dir
from tiny import random_ids, tiny_checkpoint

from quasar_trt.engines import executor_session, open_engine
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.engines.tensorrt_llm import TensorRTLLMEngine
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

MODEL = tiny_checkpoint(num_hidden_layers=2)
REFERENCE = ReferenceModel(*MODEL)


@pytest.fixture
def host(monkeypatch):
    """A machine with TensorRT-LLM and one GPU; `ranks` starts the program on several."""
    monkeypatch.setattr(executor_session, "llm_release", lambda: "1.2.1")
    monkeypatch.setattr(executor_session, "CudaDevice", lambda: SimpleNamespace(sm=90, name="a double"))
    monkeypatch.setattr(executor_session.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/quasar-trt", "generate", "an engine"])

    def ranks(rank, size):
        mpi = ModuleType("mpi4py.MPI")
        mpi.COMM_WORLD = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)

    ranks(0, 1)
    with executor_double(REFERENCE) as bindings:
        yield SimpleNamespace(bindings=bindings, ranks=ranks)


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
    assert executor.config.kv_cache_config.enable_block_reuse and executor.config.gather_generation_logits
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


def test_several_ranks_for_an_engine_of_one_are_refused_by_the_first_alone(host, engine_dir):
    host.ranks(0, 2)
    with pytest.raises(
        QuasarError,
        match="has tp_size 1, and this program runs on 2 ranks; start it as: quasar-trt generate 'an engine'",
    ):
        open_engine(engine_dir)
    host.ranks(1, 2)
    with pytest.raises(SystemExit) as leaving:
        open_engine(engine_dir)
    assert not leaving.value.code


@pytest.mark.parametrize(
    ("program", "command"),
    [("/usr/bin/quasar-trt", "mpirun -n 4 quasar-trt run x"), ("a/b.py", "mpirun -n 4 python a/b.py run x")],
)
def test_command_that_starts_the_ranks(monkeypatch, program, command):
    monkeypatch.setattr(sys, "argv", [program, "run", "x"])
    assert executor_session._launch(4) == command


def test_first_of_several_ranks_leads_and_the_others_serve_it_and_end(host, tmp_path, monkeypatch):
    directory = write_llm_dir(tmp_path / "two", MODEL, tp_size=2)
    monkeypatch.setattr(
        executor_session.Checkpoint, "open", lambda path: SimpleNamespace(config=MODEL[0], recipe=MODEL[1])
    )
    with pytest.raises(
        QuasarError, match="tp_size 2, and this program runs on 1 rank; start it as: mpirun -n 2 quasar-trt generate"
    ):
        open_engine(directory)
    host.ranks(0, 2)
    with pytest.raises(QuasarError, match=r"2 GPUs per machine \(gpus_per_node\); this one has 1"):
        open_engine(directory)
    monkeypatch.setattr(executor_session.torch.cuda, "device_count", lambda: 2)
    made = []
    for rank in range(2):
        host.ranks(rank, 2)

        class Executor(host.bindings.Executor):
            world_size = 2

            def __init__(self, *arguments, rank=rank):
                self.rank = rank
                super().__init__(*arguments)
                made.append(self)

        monkeypatch.setattr(host.bindings, "Executor", Executor)
        if rank == 0:
            runner = Runner(open_engine(directory))
            (output,) = runner.generate([[1, 2, 3]], SamplingParams(top_p=0.9, seed=1, max_tokens=3))
            assert len(output.outputs[0].token_ids) == 3
            (drafts, *_) = [each.external_draft_tokens_config for each in made[0].requests]
            assert drafts.logits.shape[1] == MODEL[0].vocab_size + 1  # the head's rows divide by two
        else:
            with pytest.raises(SystemExit) as leaving:
                open_engine(directory)
            assert not leaving.value.code and made[1]._shut
