#!/usr/bin/env bash
# A forbidden import fails the build: makes one in a scratch copy of this tree and asks Pants.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(readlink -f "$0")")")")
scratch=$(mktemp -d)
# Five questions to one Pants: its daemon is used here and ended with the copy.
export PANTS_PANTSD=true
clean() {
  cat "$scratch"/.pids/*/pantsd/pid 2>/dev/null | xargs -r kill 2>/dev/null || true
  rm -rf "$scratch"
}
trap clean EXIT
passed=0 failed=0

cd "$root"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --ignore-failed-read -cf - 2>/dev/null | tar -xf - -C "$scratch"
cd "$scratch"
# A second method, as a real one would be declared.
mkdir -p packages/other/src/lyceum_other
echo 'sources()' >packages/other/src/BUILD
echo 'method_package("other", "A second method")' >packages/other/BUILD
echo 'SHARED = 1' >packages/other/src/lyceum_other/__init__.py

# report NAME DENIED: reads all dependencies; DENIED is the arrow Pants must refuse, "" expects none to be refused.
report() {
  local name=$1 denied=$2 output status=0
  output=$(tools/pants --no-dynamic-ui dependencies packages:: 2>&1) || status=$?
  if [[ -z $denied ]]; then
    ((status == 0))
  else
    ((status != 0)) && grep -q DependencyRuleActionDeniedError <<<"$output" && grep -Eq "$denied" <<<"$output"
  fi && passed=$((passed + 1)) && echo "import rules: $name: passed" && return
  failed=$((failed + 1))
  echo "import rules: $name: FAILED (Pants ended with $status)"
  tail -n 20 <<<"$output"
}

core=packages/apex/src/lyceum_apex/forbidden.py
from_core="python_sources $core[^ ]* ->"

echo 'from lyceum_base import Streams' >"$core"
report "a core may import a shared library" ""
echo 'import grpc' >"$core"
report "a core must not import grpc" "$from_core python_requirements tools:reqs#grpcio"
echo 'from lyceum_other import SHARED' >"$core"
report "a method must not import another method" "$from_core python_sources packages/other/"
echo 'from lyceum.common.v1 import common_pb2' >"$core"
report "a core must not import the protos" "$from_core protobuf_sources protos/lyceum/common/"
rm "$core"
runtime=packages/runtime/src/lyceum_runtime/forbidden.py
echo 'from lyceum_apex import errors' >"$runtime"
report "the runtime must not import a method" "python_sources $runtime[^ ]* -> python_sources packages/apex/"

echo "$passed passed, $failed failed"
((failed == 0))
