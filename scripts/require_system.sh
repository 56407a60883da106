#!/bin/sh
# Makes sure that the system packages are there which pip cannot bring: installs them with apt where there is apt and
# root, and otherwise says in one sentence what to type.
#   require_system.sh build   a C++20 compiler, Python's headers and venv
#   require_system.sh test    those and Catch2
set -eu

missing=""
command -v c++ >/dev/null 2>&1 || missing="$missing g++"
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null 2>&1; then
  missing="$missing python3 python3-venv python3-dev"
else
  "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || missing="$missing python3-venv"
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
  [ -e "$header" ] || missing="$missing python3-dev"
fi
if [ "${1:-build}" = test ]; then
  probe='#if __has_include(<catch2/catch.hpp>) || __has_include(<catch2/catch_test_macros.hpp>)
int main() {}
#else
#error
#endif'
  if command -v c++ >/dev/null 2>&1; then
    printf '%s\n' "$probe" | c++ -x c++ -fsyntax-only - >/dev/null 2>&1 || missing="$missing catch2"
  else
    missing="$missing catch2"
  fi
fi
[ -n "$missing" ] || exit 0

if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  echo "AllFinite: installing with apt:$missing"
  apt-get update -qq
  # shellcheck disable=SC2086  # a list of words
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
else
  echo "AllFinite: these system packages are missing; type: sudo apt-get install$missing" >&2
  exit 1
fi
