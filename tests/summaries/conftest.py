from evaluation.by_hand import first_text, quick_statistics, result, rights, text  # noqa: F401
