#!/usr/bin/env bash
# System packages that make installs where it can: as root on Debian and its children. Elsewhere, and where
# that fails, it says what is missing and why it matters, and make goes on.
#   system_packages.sh serve    what makes serving fast: OpenBLAS for the CPU backend
#   system_packages.sh test     that, and what the tests drive: curl, Node's clients and a browser
set -uo pipefail

want=${1:?serve or test}
missing=()
on_linux_cpu=false
[ "$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ] && on_linux_cpu=true

has_openblas() {
  compgen -G '/usr/lib/*/openblas-pthread/libopenblas.so.0' || compgen -G '/usr/lib64/libopenblas*'
}

if $on_linux_cpu && ! has_openblas >/dev/null; then
  missing+=(libopenblas0-pthread)
fi
if [ "$want" = test ]; then
  command -v curl >/dev/null || missing+=(curl)
  command -v node >/dev/null || missing+=(nodejs)
  command -v npm >/dev/null || missing+=(npm)
  for browser in "${CHROMIUM:-}" chromium chromium-browser google-chrome chrome; do
    [ -n "$browser" ] && command -v "$browser" >/dev/null && break
    [ -e "/Applications/Google Chrome.app" ] && browser=chrome && break
    browser=
  done
  [ -n "$browser" ] || missing+=(chromium)
fi
[ "${#missing[@]}" -gt 0 ] || exit 0

install_missing() {
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

if [ -f /etc/debian_version ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]}"
  # A mirror that is being updated fails once.
  install_missing >/dev/null || { sleep 10; install_missing >/dev/null; } && exit 0
fi
for package in "${missing[@]}"; do
  case $package in
    libopenblas0-pthread) why="prompts are read fifteen times slower without it, answers written half as fast" ;;
    chromium) why="the dashboard's tests drive it; \$CHROMIUM may name another one" ;;
    nodejs | npm) why="the official Node clients are tried on it, 18 or newer" ;;
    *) why="tests use it" ;;
  esac
  echo "not installed: $package ($why); on Debian: apt-get install $package" >&2
done
exit 0
