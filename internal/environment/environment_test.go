package environment

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/sanconn/san/session"
)

func TestParseEnvironment(t *testing.T) {
	all := []string{"shm", "verbs"}
	for _, c := range []struct {
		name string
		vars map[string]string
		want Values
		err  string
	}{
		{name: "nothing set"},
		{name: "set but empty", vars: map[string]string{"SAN_PROVIDERS": " ", "SAN_DISABLE": ""}},
		{name: "a list of nothing", vars: map[string]string{"SAN_PROVIDERS": ","}, want: Values{}},
		{name: "none", vars: map[string]string{"SAN_PROVIDERS": "none"}, want: Values{}},
		{name: "a list, untidy", vars: map[string]string{"SAN_PROVIDERS": " verbs,, SHM "},
			want: Values{Providers: []string{"verbs", "shm"}}},
		{name: "mechanisms", vars: map[string]string{"SAN_DISABLE": "rdmaread, poll"},
			want: Values{Disable: session.FeatureRDMARead | session.FeaturePoll}},
		{name: "RDMA", vars: map[string]string{"SAN_SUBNETS": "10.8.0.0/16, FD08::/64", "SAN_IWARP_OFFSET": " 20000", "SAN_SHARED_DOMAIN": "on", "SAN_RDMACM": "OFF"},
			want: Values{SharedDomain: true, IWARPOffset: 20000, WithoutCM: true,
				Subnets: []netip.Prefix{netip.MustParsePrefix("10.8.0.0/16"), netip.MustParsePrefix("fd08::/64")}}},
		{name: "RDMA's network", vars: map[string]string{"SAN_TRAFFIC_CLASS": "106", "SAN_SERVICE_LEVEL": " 3", "SAN_ACK_TIMEOUT": "17"},
			want: Values{TrafficClass: 106, ServiceLevel: 3, AckTimeout: 17}},
		{name: "no class", vars: map[string]string{"SAN_TRAFFIC_CLASS": "256"}, err: "SAN_TRAFFIC_CLASS=256"},
		{name: "no level", vars: map[string]string{"SAN_SERVICE_LEVEL": "16"}, err: "SAN_SERVICE_LEVEL=16"},
		{name: "arena", vars: map[string]string{"SAN_ARENA": " 512 "}, want: Values{arena: 512}},
		{name: "no arena", vars: map[string]string{"SAN_ARENA": "64M"}, err: "SAN_ARENA=64M"},
		{name: "a trace", vars: map[string]string{"SAN_TRACE": "/var/log/san.trace"}, want: Values{tracePath: "/var/log/san.trace"}},
		{name: "moves now", vars: map[string]string{"SAN_MOVE": " NOW"}, want: Values{MoveAtOnce: true}},
		{name: "moves later", vars: map[string]string{"SAN_MOVE": "1"}, err: "SAN_MOVE=1"},
		{name: "no exponent", vars: map[string]string{"SAN_ACK_TIMEOUT": "2s"}, err: "SAN_ACK_TIMEOUT=2s"},
		{name: "RDMA as it is", vars: map[string]string{"SAN_SUBNETS": " ", "SAN_IWARP_OFFSET": "", "SAN_SHARED_DOMAIN": "off", "SAN_RDMACM": "on"}},
		{name: "no iWARP", vars: map[string]string{"SAN_IWARP_OFFSET": "-1"}, want: Values{IWARPOffset: -1}},
		{name: "no subnet", vars: map[string]string{"SAN_SUBNETS": "10.8.0.1"}, err: `"10.8.0.1" in SAN_SUBNETS`},
		{name: "no offset", vars: map[string]string{"SAN_IWARP_OFFSET": "tcp"}, err: "SAN_IWARP_OFFSET=tcp"},
		{name: "an offset of 0", vars: map[string]string{"SAN_IWARP_OFFSET": "0"}, err: "SAN_IWARP_OFFSET=0"},
		{name: "too large an offset", vars: map[string]string{"SAN_IWARP_OFFSET": "65536"}, err: "SAN_IWARP_OFFSET=65536"},
		{name: "neither on nor off", vars: map[string]string{"SAN_SHARED_DOMAIN": "yes"}, err: "SAN_SHARED_DOMAIN=yes"},
		{name: "nor this", vars: map[string]string{"SAN_RDMACM": "no"}, err: "SAN_RDMACM=no"},
		{name: "unknown provider", vars: map[string]string{"SAN_PROVIDERS": "shm,rdma"}, err: `"rdma" in SAN_PROVIDERS`},
		{name: "unknown mechanism", vars: map[string]string{"SAN_DISABLE": "zerocopy"}, err: `"zerocopy" in SAN_DISABLE`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := parse(func(k string) (string, bool) { v, ok := c.vars[k]; return v, ok }, all)
			if (got.Err == nil) != (c.err == "") || got.Err != nil && !strings.Contains(got.Err.Error(), c.err) {
				t.Fatalf("error %v, want %q", got.Err, c.err)
			}
			if c.err != "" {
				return
			}
			if strings.TrimSpace(c.vars["SAN_PROVIDERS"]) == "" {
				c.want.Providers = all
			}
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(Values{}), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
