//go:build linux

package overlay

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestPrometheus runs prometheus, which scrapes two exporters, one of them plain.
func TestPrometheus(t *testing.T) {
	file := others(t, san, "prometheus")
	_, exporter := begin(t, own(t, san, "web"))
	_, plain := begin(t, own(t, "go", "web"))

	config := filepath.Join(t.TempDir(), "prometheus.yml")
	text := fmt.Sprintf("global:\n  scrape_interval: 250ms\n  scrape_timeout: 250ms\n"+
		"scrape_configs:\n- job_name: web\n  static_configs:\n  - targets: [%q, %q]\n", exporter, plain)
	if err := os.WriteFile(config, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
	address := freeAddress(t)
	start(t, file, "--config.file="+config, "--storage.tsdb.path="+t.TempDir(), "--web.listen-address="+address)
	until(t, "http://"+address+"/-/ready")
	accepted := moved(1, func() counters { return vars(t, "http://"+exporter+"/debug/vars") })
	report(t, "prometheus's exporter", nil, accepted, 0, 1)
	var up string
	if !eventually(func() bool {
		up = string(until(t, "http://"+address+"/api/v1/query?query=sum(up)"))
		return strings.Contains(up, `"2"`)
	}) {
		t.Fatalf("not both are up: %s", up)
	}
}
