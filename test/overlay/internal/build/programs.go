package build

// A Source is the modules of a repository, by their directories in it.
type Source struct {
	Name    string
	Modules map[string]string
}

// A Program is a package of a source.
type Program struct {
	Source       Source
	Dir, Package string   // the directory in which it is built, and its package
	Flags, Env   []string // for the build
}

// etcd's go.mod files replace its modules by the neighbouring directories.
var etcd = Source{"etcd", map[string]string{
	"api":        "go.etcd.io/etcd/api/v3@v3.6.5",
	"client/pkg": "go.etcd.io/etcd/client/pkg/v3@v3.6.5",
	"client/v3":  "go.etcd.io/etcd/client/v3@v3.6.5",
	"etcdctl":    "go.etcd.io/etcd/etcdctl/v3@v3.6.5",
	"pkg":        "go.etcd.io/etcd/pkg/v3@v3.6.5",
	"server":     "go.etcd.io/etcd/server/v3@v3.6.5",
}}

// Programs are the programs whose sources are not in this module.
var Programs = map[string]Program{
	"caddy": {
		Source:  Source{"caddy", map[string]string{"": "github.com/caddyserver/caddy/v2@v2.11.9"}},
		Package: "./cmd/caddy",
	},
	"etcd":    {Source: etcd, Dir: "server", Package: "."},
	"etcdctl": {Source: etcd, Dir: "etcdctl", Package: "."},
	"nats-server": {
		Source:  Source{"nats-server", map[string]string{"": "github.com/nats-io/nats-server/v2@v2.15.2"}},
		Package: ".",
	},
	"prometheus": {
		Source:  Source{"prometheus", map[string]string{"": "github.com/prometheus/prometheus@v0.316.0"}},
		Package: "./cmd/prometheus",
		// Its go.work names modules that this one does not have. Most of its build is for the clouds in
		// which it can search for targets.
		Flags: []string{"-tags=remove_all_sd"}, Env: []string{"GOWORK=off"},
	},
}
