@echo off
setlocal EnableExtensions DisableDelayedExpansion

rem Shows the Windows GPU timeout values (TDR), which trouble this machine really has, and, only when asked to,
rem raises the timeout. Facts: Microsoft Learn, "Testing and debugging TDR during driver development".
rem Programs are called by their full path: this may run as administrator in a folder that others can write to.

set "SYS=%SystemRoot%\System32"
set "KEY=HKLM\SYSTEM\CurrentControlSet\Control\GraphicsDrivers"
set "FOLDER=%ProgramData%\finetune-preflight"
set "UNDO=%FOLDER%\tdr-undo.reg"
set "LOWEST=2"
set "HIGHEST=300"
set "DELAY=60"
set "JOB=ask"
set "YES="
set "EVENTS="

:next_argument
if "%~1"=="" goto arguments_done
if /i "%~1"=="/show" set "JOB=show" & shift & goto next_argument
if /i "%~1"=="/undo" set "JOB=undo" & shift & goto next_argument
if /i "%~1"=="/yes" set "YES=1" & shift & goto next_argument
if /i "%~1"=="/delay" set "DELAY=%~2" & shift & shift & goto next_argument
if /i "%~1"=="/events" set "EVENTS=%~2" & shift & shift & goto next_argument
if /i "%~1"=="/?" goto usage
if /i "%~1"=="/help" goto usage
echo error: unknown option: "%~1"
echo.
call :print_usage
exit /b 2

:arguments_done
call :check_delay
if errorlevel 1 exit /b 2
if defined EVENTS if not exist "%EVENTS%" (
    echo error: /events "%EVENTS%": no such file
    exit /b 2
)

call :read_values
call :show_values
if "%JOB%"=="undo" goto undo
call :show_driver_model
call :read_events
call :show_trouble
if "%JOB%"=="show" exit /b 0
goto change

rem ---------------------------------------------------------------------------------------------------------------
:usage
call :print_usage
exit /b 0

:print_usage
echo Shows and, when asked to, raises the time after which Windows resets a GPU that does not answer (TDR).
echo.
echo   registry_fix.bat                 show, explain, ask, then write TdrDelay and TdrDdiDelay (60 s)
echo   registry_fix.bat /show           show and explain only; needs no administrator
echo   registry_fix.bat /yes            write without asking
echo   registry_fix.bat /delay N        N seconds instead of 60, from %LOWEST% to %HIGHEST%
echo   registry_fix.bat /undo           put back the values from before the first change
echo   registry_fix.bat /events FILE    judge events saved with  wevtutil qe System /f:xml ^> FILE
echo.
echo Exit codes: 0 done or shown; 1 could not be written; 2 wrong usage; 3 nothing changed, because the answer was no;
echo             5 needs an administrator
exit /b 0

rem ---------------------------------------------------------------------------------------------------------------
:check_delay
rem Digits only and no leading zero: set /a would read 010 as 8.
if not defined DELAY goto delay_wrong
for /f "delims=0123456789" %%a in ("%DELAY%") do goto delay_wrong
if "%DELAY:~0,1%"=="0" goto delay_wrong
if not "%DELAY:~3%"=="" goto delay_wrong
if %DELAY% LSS %LOWEST% goto delay_wrong
if %DELAY% GTR %HIGHEST% goto delay_wrong
exit /b 0
:delay_wrong
echo error: /delay "%DELAY%": a whole number of seconds from %LOWEST% to %HIGHEST%
exit /b 1

rem ---------------------------------------------------------------------------------------------------------------
rem VALUE_x is the number that is set, RAW_x the same as reg.exe prints it (0x3c), TYPE_x its registry type; none of
rem them is defined when the value is not set.
:read_values
for %%v in (TdrDelay TdrDdiDelay TdrLevel TccTimeout) do call :forget_value %%v
for /f "tokens=1,2,3" %%a in ('%SYS%\reg.exe query "%KEY%" 2^>nul') do call :keep_value %%a %%b %%c
exit /b 0

:forget_value
set "VALUE_%1="
set "RAW_%1="
set "TYPE_%1="
exit /b 0

:keep_value
if /i "%1"=="TdrDelay" goto keep_this_value
if /i "%1"=="TdrDdiDelay" goto keep_this_value
if /i "%1"=="TdrLevel" goto keep_this_value
if /i "%1"=="TccTimeout" goto keep_this_value
exit /b 0
:keep_this_value
set "TYPE_%1=%2"
set "RAW_%1=%3"
if /i not "%2"=="REG_DWORD" exit /b 0
rem The arithmetic of cmd.exe ends at 31 bits: a longer number comes out negative or not at all and stays as it is.
set /a "VALUE_%1=%3" 2>nul
if not defined VALUE_%1 set "VALUE_%1=%3"
call set "NUMBER=%%VALUE_%1%%"
if "%NUMBER:~0,1%"=="-" set "VALUE_%1=%3"
exit /b 0

:show_values
echo GPU timeout (TDR) values in %KEY%:
if defined VALUE_TdrDelay (echo   TdrDelay     %VALUE_TdrDelay% s) else echo   TdrDelay     not set: Windows uses 2 s
if defined VALUE_TdrDdiDelay (echo   TdrDdiDelay  %VALUE_TdrDdiDelay% s) else echo   TdrDdiDelay  not set: Windows uses 5 s
if defined VALUE_TdrLevel (echo   TdrLevel     %VALUE_TdrLevel%) else echo   TdrLevel     not set: Windows uses 3, reset and recover
if "%VALUE_TdrLevel%"=="0" (
    echo   warning: TdrLevel 0 switches the detection off: a kernel that hangs then freezes the desktop for good.
    echo            Remove it:  reg delete "%KEY%" /v TdrLevel
)
if defined TYPE_TccTimeout (
    echo   note: TccTimeout is set, but nothing reads it: no such value exists. TCC is a driver model without TDR.
    echo         Remove it:  reg delete "%KEY%" /v TccTimeout
)
exit /b 0

rem ---------------------------------------------------------------------------------------------------------------
:show_driver_model
set "SMI=%SYS%\nvidia-smi.exe"
if not exist "%SMI%" set "SMI=%ProgramFiles%\NVIDIA Corporation\NVSMI\nvidia-smi.exe"
echo.
echo Driver model (index, name, now, after a reboot):
if not exist "%SMI%" (
    echo   could not tell: nvidia-smi.exe was not found
    exit /b 0
)
"%SMI%" --query-gpu=index,name,driver_model.current,driver_model.pending --format=csv,noheader
if errorlevel 1 echo   could not tell: nvidia-smi failed
echo   WDDM: Windows schedules this GPU, the timeout applies. TCC: it does not. MCDM: compute only; not verified.
exit /b 0

rem ---------------------------------------------------------------------------------------------------------------
rem Events of the last 30 days as XML, one event per line, so that the language of Windows does not matter.
:read_events
set "SEEN=%EVENTS%"
if defined EVENTS goto count_events
set "SEEN=%TEMP%\tdr-events-%RANDOM%%RANDOM%.xml"
set "SINCE=TimeCreated[timediff(@SystemTime) <= 2592000000]"
set "WHO=Provider[@Name='Display' or @Name='nvlddmkm' or @Name='Microsoft-Windows-WHEA-Logger' or @Name='Microsoft-Windows-WER-SystemErrorReporting']"
"%SYS%\wevtutil.exe" qe System "/q:*[System[%WHO% and %SINCE%]]" /c:500 /rd:true /f:xml >"%SEEN%" 2>nul
if errorlevel 1 set "EVENTS_FAILED=1"
"%SYS%\wevtutil.exe" qe Application "/q:*[System[Provider[@Name='Windows Error Reporting'] and %SINCE%] and EventData[Data='LiveKernelEvent']]" /c:100 /rd:true /f:xml >>"%SEEN%" 2>nul
if errorlevel 1 set "EVENTS_FAILED=1"
:count_events
for %%c in (RESETS NV14 NV153 WHEA17 WHEA18 LIVE141 LIVE117 BUG116) do set "%%c=0"
for %%f in ("%SEEN%") do if "%%~zf"=="0" goto events_counted
call :count RESETS "'Display'" ">4101</EventID>"
call :count NV14 "'nvlddmkm'" ">14</EventID>"
call :count NV153 "'nvlddmkm'" ">153</EventID>"
call :count WHEA17 "'Microsoft-Windows-WHEA-Logger'" ">17</EventID>"
call :count WHEA18 "'Microsoft-Windows-WHEA-Logger'" ">18</EventID>"
call :count LIVE141 "LiveKernelEvent" ">141</Data>"
call :count LIVE117 "LiveKernelEvent" ">117</Data>"
call :count BUG116 "'Microsoft-Windows-WER-SystemErrorReporting'" "0x00000116"
:events_counted
if not defined EVENTS del "%SEEN%" >nul 2>nul
exit /b 0

rem :count NAME TEXT1 TEXT2  -  lines of the events that hold both texts
:count
for /f "tokens=1" %%n in ('type "%SEEN%" ^| %SYS%\find.exe %2 ^| %SYS%\find.exe %3') do set /a "%1+=1"
exit /b 0

:show_trouble
echo.
if defined EVENTS (echo Events in "%EVENTS%":) else echo Events of the last 30 days:
if defined EVENTS_FAILED echo   could not tell: the event log could not be read completely
echo   timeout resets      Display 4101: %RESETS%   LiveKernelEvent 141: %LIVE141%   117: %LIVE117%   stop code 0x116: %BUG116%
echo   link and hardware   nvlddmkm 14: %NV14%   153: %NV153%   WHEA-Logger 17: %WHEA17%   18: %WHEA18%
set /a "TIMEOUTS=RESETS+LIVE141+LIVE117+BUG116"
set /a "WHEA=WHEA17+WHEA18"
set /a "DRIVER=NV14+NV153"
set "TROUBLE=none"
if %DRIVER% GTR 0 set "TROUBLE=driver"
if %TIMEOUTS% GTR 0 set "TROUBLE=timeout"
if %WHEA% GTR 0 set "TROUBLE=link"
if %WHEA% GTR 0 if %TIMEOUTS% GTR 0 set "TROUBLE=both"
if "%TROUBLE%"=="none" if defined EVENTS_FAILED set "TROUBLE=unknown"
echo.
goto trouble_%TROUBLE%

:trouble_none
echo Trouble: none seen. No GPU reset and no link error is in the log, so raising the timeout would cure nothing.
exit /b 0
:trouble_unknown
echo Trouble: could not tell.
exit /b 0
:trouble_timeout
echo Trouble: timeout resets. Windows reset a GPU that did not answer in time.
echo   First: smaller batches or shorter kernels, a newer driver, another GPU for the display, no overclocking.
echo   A longer timeout helps only where single kernels really run for seconds; those of language models take
echo   milliseconds. A kernel that hangs will hang longer.
if %BUG116% GTR 0 echo   Stop code 0x116: the reset failed and Windows crashed. That is a driver or hardware fault; a longer timeout hides it.
exit /b 0
:trouble_link
echo Trouble: link loss. The hardware reported errors (WHEA 17 or 18), which is not a timeout.
echo   Raising the timeout does not help. Look at power supply and cables, riser, heat, overclocking, the slot,
echo   PCIe power saving (ASPM), BIOS and driver.
exit /b 0
:trouble_driver
echo Trouble: the NVIDIA driver reported errors (nvlddmkm 14 or 153), but no timeout reset is in the log.
echo   That points to a lost link or a driver fault. Raising the timeout does not help. Look at power supply and
echo   cables, riser, heat, overclocking, and the driver version.
exit /b 0
:trouble_both
echo Trouble: link errors (WHEA 17 or 18) and resets. The resets most likely follow from the link errors.
echo   Cure the link first: power supply and cables, riser, heat, overclocking, slot, PCIe power saving (ASPM), driver.
echo   Raising the timeout does not help against that.
exit /b 0

rem ---------------------------------------------------------------------------------------------------------------
:change
echo.
echo What would be written:
echo   TdrDelay     %DELAY% s   how long the GPU may take to give way
set "DDI=%DELAY%"
if %DDI% LSS 5 set "DDI=5"
echo   TdrDdiDelay  %DDI% s   how long a thread may stay in the driver
echo   Microsoft gives these values for developing drivers; they are no general cure. While a kernel runs longer than
echo   2 s, the desktop on that GPU stands still. TdrLevel is left alone. The old values are saved first, /undo puts
echo   them back. Both take effect after a reboot.
call :must_be_admin
if errorlevel 1 exit /b 5
if defined YES goto write
set "ANSWER="
set /p "ANSWER=Write these values? Type yes to go on: "
if /i "%ANSWER%"=="yes" goto write
echo Nothing was changed.
exit /b 3

:write
call :save_undo
if errorlevel 1 exit /b 1
"%SYS%\reg.exe" add "%KEY%" /v TdrDelay /t REG_DWORD /d %DELAY% /f >nul
if errorlevel 1 goto write_failed
"%SYS%\reg.exe" add "%KEY%" /v TdrDdiDelay /t REG_DWORD /d %DDI% /f >nul
if errorlevel 1 goto write_failed
call :read_values
if not "%VALUE_TdrDelay%"=="%DELAY%" goto write_failed
if not "%VALUE_TdrDdiDelay%"=="%DDI%" goto write_failed
echo Written: TdrDelay %DELAY% s, TdrDdiDelay %DDI% s. Reboot for them to take effect.
echo Undo: registry_fix.bat /undo   (old values: "%UNDO%")
exit /b 0
:write_failed
echo error: the values could not be written completely; registry_fix.bat /undo puts the old ones back
exit /b 1

rem The first file is kept: it holds the values from before any change.
:save_undo
if not exist "%FOLDER%" mkdir "%FOLDER%"
if exist "%UNDO%" (
    echo Kept: "%UNDO%" with the values from before the first change
    exit /b 0
)
call :may_be_saved TdrDelay
if errorlevel 1 exit /b 1
call :may_be_saved TdrDdiDelay
if errorlevel 1 exit /b 1
if exist "%UNDO%.part" del "%UNDO%.part"
>"%UNDO%.part" echo Windows Registry Editor Version 5.00
if not exist "%UNDO%.part" (
    echo error: "%UNDO%" could not be written, so nothing was changed
    exit /b 1
)
>>"%UNDO%.part" echo.
>>"%UNDO%.part" echo [HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\GraphicsDrivers]
call :undo_line TdrDelay
call :undo_line TdrDdiDelay
move /y "%UNDO%.part" "%UNDO%" >nul
if not exist "%UNDO%" (
    echo error: "%UNDO%" could not be written, so nothing was changed
    exit /b 1
)
echo Saved: "%UNDO%" with the old values
exit /b 0

rem A value of another type was put there by somebody else and could not be restored from a number.
:may_be_saved
call set "KIND=%%TYPE_%1%%"
if not defined KIND exit /b 0
if /i "%KIND%"=="REG_DWORD" exit /b 0
echo error: %1 has the type %KIND% instead of REG_DWORD, so nothing was changed. Look at it with regedit and remove it.
exit /b 1

:undo_line
call set "OLD=%%RAW_%1%%"
if not defined OLD (
    >>"%UNDO%.part" echo "%1"=-
    exit /b 0
)
set "OLD=0000000%OLD:~2%"
>>"%UNDO%.part" echo "%1"=dword:%OLD:~-8%
exit /b 0

rem ---------------------------------------------------------------------------------------------------------------
:undo
if not exist "%UNDO%" (
    echo Nothing to undo: "%UNDO%" does not exist, so this script has changed nothing.
    exit /b 0
)
call :must_be_admin
if errorlevel 1 exit /b 5
rem Not reg import: others may be able to write to that folder, and an import would write whatever they put there.
set "FOUND="
set "FAILED="
for /f "usebackq tokens=1,2 delims==" %%a in ("%UNDO%") do call :put_back %%a %%b
if not defined FOUND set "FAILED=1"
if defined FAILED (
    echo error: the values of "%UNDO%" could not be put back completely; it is kept
    exit /b 1
)
move /y "%UNDO%" "%FOLDER%\tdr-undo-done.reg" >nul
call :read_values
echo.
echo Put back. Reboot for it to take effect.
call :show_values
exit /b 0

rem :put_back NAME VALUE  -  one line of the undo file; VALUE is - or dword:xxxxxxxx, all else is passed over
:put_back
set "NAME=%~1"
if /i not "%NAME%"=="TdrDelay" if /i not "%NAME%"=="TdrDdiDelay" exit /b 0
if "%~2"=="-" goto put_back_nothing
set "NUMBER=%~2"
if /i not "%NUMBER:~0,6%"=="dword:" exit /b 0
set "NUMBER=%NUMBER:~6%"
for /f "delims=0123456789abcdefABCDEF" %%x in ("%NUMBER%") do exit /b 0
if "%NUMBER%"=="" exit /b 0
if not "%NUMBER:~8%"=="" exit /b 0
set "FOUND=1"
"%SYS%\reg.exe" add "%KEY%" /v %NAME% /t REG_DWORD /d 0x%NUMBER% /f >nul
if errorlevel 1 set "FAILED=1"
exit /b 0
:put_back_nothing
set "FOUND=1"
"%SYS%\reg.exe" query "%KEY%" /v %NAME% >nul 2>nul
if errorlevel 1 exit /b 0
"%SYS%\reg.exe" delete "%KEY%" /v %NAME% /f >nul
if errorlevel 1 set "FAILED=1"
exit /b 0

rem Only administrators may read the registry of the local service account.
:must_be_admin
"%SYS%\reg.exe" query "HKU\S-1-5-19" >nul 2>nul
if not errorlevel 1 exit /b 0
echo.
echo error: this needs an administrator: right-click "Command Prompt", "Run as administrator", and run it again there.
echo        Nothing was changed.
exit /b 5
