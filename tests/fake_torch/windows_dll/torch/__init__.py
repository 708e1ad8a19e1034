"""A DLL is missing, as Windows says it."""
raise OSError("[WinError 126] The specified module could not be found. Error loading \"torch\\\\lib\\\\fbgemm.dll\" or one of its dependencies.")
