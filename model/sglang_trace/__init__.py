"""The composed model for SGLang: a package of external models that lies in the folder of the export and serves it.

    PYTHONPATH=EXPORT SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_trace python -m sglang.launch_server --model-path EXPORT

EXPORT is the absolute path of the folder that `trace-jax export --what=composed --out=EXPORT` wrote. `models.py` says what runs.
"""
