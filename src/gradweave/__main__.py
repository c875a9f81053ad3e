"""``python -m gradweave``, for launchers such as ``torchrun -m``."""

from gradweave.cli import main

raise SystemExit(main())
