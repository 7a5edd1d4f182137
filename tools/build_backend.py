"""pip's way to setup_ops.py: setuptools' own backend, which looks for a file called setup.py."""

from setuptools.build_meta import _BuildMetaBackend


class _Backend(_BuildMetaBackend):
    def run_setup(self, setup_script="setup_ops.py"):
        super().run_setup(setup_script)


_backend = _Backend()
build_wheel = _backend.build_wheel
build_sdist = _backend.build_sdist
build_editable = _backend.build_editable
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_editable = _backend.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
