"""The measurements behind ``kvcanary bench``, one subject a module; :mod:`.rows` names and judges them."""
