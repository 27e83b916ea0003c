# Two commands: `make demo` trains a BERT with two processes, `make test` passes the tests.
# Each sets up what it needs in .venv first; a second call finds it there.

.PHONY: demo test check docs setup clean

demo:
	@scripts/setup demo
	@.venv/bin/paceline demo

test:
	@scripts/setup dev
	@scripts/check
	@scripts/test

check:
	@scripts/setup dev
	@scripts/check

docs:
	@scripts/setup docs
	@scripts/docs

clean:
	rm -rf .venv build
