from lyceum_runtime.server import main
from lyceum_runtime.testing_service import ENTRY

main([ENTRY])
