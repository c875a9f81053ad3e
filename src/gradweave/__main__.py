"""``python -m gradweave``, for launchers such as ``torchrun -m``."""

from gradweave._src.cli import main

raise SystemExit(main())
