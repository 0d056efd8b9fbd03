from lyceum_runtime.server import main

main(["apex"])
