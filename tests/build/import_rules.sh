#!/usr/bin/env bash
# A forbidden import fails the build: makes one in a scratch copy of this tree and asks Pants.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(readlink -f "$0")")")")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0 failed=0

cd "$root"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --ignore-failed-read -cf - 2>/dev/null | tar -xf - -C "$scratch"
cd "$scratch"
# A second method, as a real one would be declared.
mkdir -p packages/other/src/lyceum_other
echo 'sources()' >packages/other/src/BUILD
echo 'method_package("other", "A second method")' >packages/other/BUILD
echo 'SHARED = 1' >packages/other/src/lyceum_other/__init__.py

# report NAME EXPECTED-ERROR: all dependencies are read; "" expects them to be in order.
report() {
  local output status=0
  output=$(tools/pants --no-pantsd --no-dynamic-ui dependencies packages:: 2>&1) || status=$?
  if { [[ -z $2 ]] && ((status == 0)); } || { [[ -n $2 ]] && ((status != 0)) && grep -Eq "$2" <<<"$output"; }; then
    passed=$((passed + 1))
    echo "import rules: $1: passed"
  else
    failed=$((failed + 1))
    echo "import rules: $1: FAILED (Pants ended with $status)"
    tail -n 20 <<<"$output"
  fi
}

core=packages/apex/src/lyceum_apex/forbidden.py
denied='DENY[[:space:]]+python_sources packages/apex/src/lyceum_apex/forbidden.py[^ ]* -> '

echo 'from lyceum_base import Streams' >"$core"
report "a core may import a shared library" ""
echo 'import grpc' >"$core"
report "a core must not import grpc" "${denied}python_requirement(s)? tools(/requirements.txt)?:reqs#grpcio"
echo 'from lyceum_other import SHARED' >"$core"
report "a method must not import another method" "${denied}python_sources packages/other/"
echo 'from lyceum.common.v1 import common_pb2' >"$core"
report "a core must not import the protos" "${denied}protobuf_sources? protos/lyceum/common/"
rm "$core"
echo 'from lyceum_apex import errors' >packages/runtime/src/lyceum_runtime/forbidden.py
report "the runtime must not import a method" 'packages/runtime/src/lyceum_runtime/forbidden.py[^ ]* -> python_sources packages/apex/'

echo "$passed passed, $failed failed"
((failed == 0))
