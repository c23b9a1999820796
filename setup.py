"""What pyproject.toml cannot say: configs/ lies beside the package, and inside when installed."""

import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
DIRECTORIES = sorted({file.parent.relative_to(ROOT) for file in ROOT.glob("configs/**/*.gin")})
CONFIGS = {f"m6jax.{'.'.join(directory.parts)}": str(directory) for directory in DIRECTORIES}

setup(
    packages=[*find_packages(include=["m6jax*"]), *CONFIGS],
    package_dir=CONFIGS,
    package_data={"m6jax.data": ["builtin/*"], **{name: ["*.gin"] for name in CONFIGS}},
)
