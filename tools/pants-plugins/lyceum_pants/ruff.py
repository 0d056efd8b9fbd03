"""ruff's checks, fixes and format as `lint`, `fix` and `fmt`.

Pants 2.17 calls ruff as it was before it had subcommands; its options and fields are used here as they are.
"""

from __future__ import annotations

from typing import Any

from pants.backend.python.lint.ruff import skip_field, subsystem
from pants.backend.python.lint.ruff.subsystem import Ruff, RuffFieldSet
from pants.backend.python.util_rules import pex
from pants.backend.python.util_rules.pex import PexRequest, VenvPex, VenvPexProcess
from pants.core.goals.fix import FixResult, FixTargetsRequest
from pants.core.goals.fmt import FmtResult, FmtTargetsRequest
from pants.core.goals.lint import LintResult, LintTargetsRequest
from pants.core.util_rules.config_files import ConfigFiles, ConfigFilesRequest
from pants.core.util_rules.partitions import PartitionerType
from pants.core.util_rules.source_files import SourceFiles, SourceFilesRequest
from pants.engine.fs import Digest, MergeDigests, Snapshot
from pants.engine.process import FallibleProcessResult, ProcessResult
from pants.engine.rules import Get, MultiGet, collect_rules, rule
from pants.util.logging import LogLevel
from pants.util.meta import classproperty


class RuffCheck(LintTargetsRequest):
    field_set_type = RuffFieldSet
    tool_subsystem = Ruff
    partitioner_type = PartitionerType.DEFAULT_SINGLE_PARTITION

    @classproperty
    def tool_name(cls) -> str:
        return "ruff check"


class RuffFix(FixTargetsRequest):
    field_set_type = RuffFieldSet
    tool_subsystem = Ruff
    partitioner_type = PartitionerType.DEFAULT_SINGLE_PARTITION

    @classproperty
    def tool_name(cls) -> str:
        return "ruff fix"


class RuffFormat(FmtTargetsRequest):
    field_set_type = RuffFieldSet
    tool_subsystem = Ruff
    partitioner_type = PartitionerType.DEFAULT_SINGLE_PARTITION

    @classproperty
    def tool_name(cls) -> str:
        return "ruff format"


async def _process(ruff: Ruff, snapshot: Snapshot, *command: str) -> VenvPexProcess:
    tool, config = await MultiGet(
        Get(VenvPex, PexRequest, ruff.to_pex_request()),
        Get(ConfigFiles, ConfigFilesRequest, ruff.config_request(snapshot.dirs)),
    )
    digest = await Get(Digest, MergeDigests((snapshot.digest, config.snapshot.digest)))
    return VenvPexProcess(
        tool,
        argv=(*command, "--no-cache", *ruff.args, *snapshot.files),
        input_digest=digest,
        output_files=snapshot.files,
        description=f"ruff {command[0]} on {len(snapshot.files)} files",
        level=LogLevel.DEBUG,
    )


@rule(desc="Check with ruff", level=LogLevel.DEBUG)
async def ruff_check(request: RuffCheck.Batch[RuffFieldSet, Any], ruff: Ruff) -> LintResult:
    files = await Get(SourceFiles, SourceFilesRequest(field_set.source for field_set in request.elements))
    process = await _process(ruff, files.snapshot, "check")
    result = await Get(FallibleProcessResult, VenvPexProcess, process)
    return LintResult.create(request, result, strip_chroot_path=True)


@rule(desc="Fix with ruff", level=LogLevel.DEBUG)
async def ruff_fix(request: RuffFix.Batch, ruff: Ruff) -> FixResult:
    process = await _process(ruff, request.snapshot, "check", "--fix", "--exit-zero")
    result = await Get(ProcessResult, VenvPexProcess, process)
    return await FixResult.create(request, result, strip_chroot_path=True)


@rule(desc="Format with ruff", level=LogLevel.DEBUG)
async def ruff_format(request: RuffFormat.Batch, ruff: Ruff) -> FmtResult:
    process = await _process(ruff, request.snapshot, "format")
    result = await Get(ProcessResult, VenvPexProcess, process)
    return await FmtResult.create(request, result, strip_chroot_path=True)


def rules():
    return [
        *collect_rules(),
        *RuffCheck.rules(),
        *RuffFix.rules(),
        *RuffFormat.rules(),
        *pex.rules(),
        *skip_field.rules(),
        *subsystem.rules(),
    ]
