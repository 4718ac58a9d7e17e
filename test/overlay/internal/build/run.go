package build

import (
	"fmt"
	"os"
	"path/filepath"
)

// EtcdArguments returns the arguments of an etcd of one member, with its data in a directory. It does
// not wait for the disk.
func EtcdArguments(dir, client, peer string) []string {
	client, peer = "http://"+client, "http://"+peer
	return []string{
		"--data-dir", dir, "--unsafe-no-fsync", "--log-level", "error",
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer,
	}
}

// CaddyArguments returns the arguments of a caddy with a site. It writes the configuration to a
// directory. Caddy's administration interface has the page of package expvar.
func CaddyArguments(dir, address, admin, site string) ([]string, error) {
	file := filepath.Join(dir, "Caddyfile")
	text := fmt.Sprintf("{\n\tadmin %s\n\tauto_https off\n\tpersist_config off\n}\nhttp://%s {\n\t%s\n}\n", admin, address, site)
	return []string{"run", "--config", file, "--adapter", "caddyfile"}, os.WriteFile(file, []byte(text), 0o666)
}
