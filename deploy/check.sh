#!/usr/bin/env bash
# Asks the tools themselves whether the files of deploy/ and .github/ are valid: deploy/check.sh
# A tool that is not installed is named and left out. No image is built: that takes a docker engine.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
missing=()

have() {
    if command -v "$1" > /dev/null; then
        echo "== $1: $2"
    else
        missing+=("$1")
        return 1
    fi
}

if have hadolint "Dockerfiles"; then
    hadolint deploy/Dockerfile deploy/Dockerfile.cuda
fi
if have check-jsonschema "compose files and workflows against their schemas"; then
    check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml deploy/compose.cuda.yaml
    check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
fi
if have actionlint "workflows"; then
    actionlint .github/workflows/*.yml
fi
if have promtool "Prometheus' configuration and alerts"; then
    sed "s#/etc/prometheus/#$PWD/deploy/#" deploy/prometheus.yml > "$work/prometheus.yml"
    promtool check config "$work/prometheus.yml"
fi
if have caddy "Caddyfile"; then
    caddy validate --adapter caddyfile --config deploy/Caddyfile 2> "$work/caddy" || { cat "$work/caddy"; exit 1; }
fi
if have nginx "nginx.conf, with a certificate of its own"; then
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=llm.example.com \
        -keyout "$work/privkey.pem" -out "$work/fullchain.pem" 2> /dev/null
    sed "s#/etc/letsencrypt/live/llm.example.com#$work#" deploy/nginx.conf > "$work/kvilt.conf"
    cat > "$work/nginx.conf" << END
pid $work/pid;
error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path $work/body;
    proxy_temp_path $work/proxy;
    fastcgi_temp_path $work/fastcgi;
    uwsgi_temp_path $work/uwsgi;
    scgi_temp_path $work/scgi;
    include $work/kvilt.conf;
}
END
    nginx -t -q -p "$work" -c "$work/nginx.conf"
fi
if have systemd-analyze "kvilt.service"; then
    sed "s#/opt/kvilt/bin/kvilt#/bin/true#" deploy/kvilt.service > "$work/kvilt.service"
    systemd-analyze verify "$work/kvilt.service"
fi
echo "checked on $(date -u +%F); not installed: ${missing[*]:-none}"
