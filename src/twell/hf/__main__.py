"""`python -m twell.hf serve FOLDER ...` is `transformers serve FOLDER ...` with our models: see `serving`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from transformers.cli.transformers import main
    from transformers.utils.import_utils import is_serve_available

    if is_serve_available():  # else transformers says what is missing
        from .serving import prepare, stop

        prepare()
        try:
            main()
        except (ValueError, OSError) as error:  # a folder without weights or tokenizer, for one
            print(f"twell: {error}", file=sys.stderr)
            sys.exit(2)  # as the command line does where it refuses something
        finally:
            stop()
    else:
        main()
