"""Small modules that every other part may import: identifiers, errors, files, clocks, child processes, logs."""
