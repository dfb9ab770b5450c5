"""Where vLLM is missing, the modules that need it are not searched for examples."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["rzero/*/vllm_*.py", "tests/vllm/spoiling.py"]
