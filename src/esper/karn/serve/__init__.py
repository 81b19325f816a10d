"""`esper serve`: runs in a browser. Needs the extra `serve` (Starlette, uvicorn). Everything in here only reads."""
