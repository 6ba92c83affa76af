package metrics_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	deploy = "../../deploy"
	page   = "../../docs/metrics.md"
)

// families returns the metric families that a scrape of a simulated job returns, which has a rank and a node
// of a parameter server.
func families(t *testing.T) map[string]*dto.MetricFamily {
	t.Helper()
	node, err := metrics.NodeText(someNode)
	if err != nil {
		t.Fatal(err)
	}
	j, _ := jobOf(t, 2, map[int][]byte{0: textOf(t, 0, asIs), 1: node})
	parser := expfmt.NewTextParser(model.LegacyValidation)
	all, err := parser.TextToMetricFamilies(strings.NewReader(shown(t, j)))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// series returns the names of all series that Prometheus has after a scrape, with the labels of each.
func series(t *testing.T) map[string][]string {
	all := make(map[string][]string)
	for name, f := range families(t) {
		labels := append(labelsOf(f), "job", "instance") // Prometheus adds these two labels
		switch f.GetType() {
		case dto.MetricType_HISTOGRAM:
			all[name+"_bucket"] = append(slices.Clone(labels), "le")
			fallthrough
		case dto.MetricType_SUMMARY:
			all[name+"_sum"], all[name+"_count"] = labels, labels
		default:
			all[name] = labels
		}
	}
	return all
}

func labelsOf(f *dto.MetricFamily) (labels []string) {
	for _, l := range f.Metric[0].Label {
		labels = append(labels, l.GetName())
	}
	return labels
}

// rules returns the expressions of the alerts in deploy/. The keys are the names of the alerts.
func rules(t *testing.T) map[string]string {
	t.Helper()
	text := testnet.ReadFile(t, filepath.Join(deploy, "alerts.yml"))
	var file struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			all[r.Alert] = r.Expr
		}
	}
	return all
}

var (
	metricNames = regexp.MustCompile(`\b(hvd|process|go)_\w+`)
	byLabels    = regexp.MustCompile(`\b(?:by|on|without|ignoring|group_left) *\(([^)]*)\)`)
)

// wantSeries checks that all metrics and labels in the expression expr exist.
func wantSeries(t *testing.T, where, expr string, exist map[string][]string) {
	t.Helper()
	var labels []string
	names := metricNames.FindAllString(expr, -1)
	if len(names) == 0 {
		t.Errorf("%s: no metric in %s", where, expr)
	}
	for _, name := range names {
		have, ok := exist[name]
		if !ok {
			t.Errorf("%s: there is no %s", where, name)
		}
		labels = append(labels, have...)
	}
	for _, list := range byLabels.FindAllStringSubmatch(expr, -1) {
		for label := range strings.FieldsFuncSeq(list[1], func(r rune) bool { return r == ',' || r == ' ' }) {
			if !slices.Contains(labels, label) {
				t.Errorf("%s: %v have no label %s", where, names, label)
			}
		}
	}
}

// All metrics in the queries of the files in deploy/ exist. Prometheus accepts the alerts and the dashboard's
// queries, and the alerts pass their tests.
func TestDeploy(t *testing.T) {
	exist := series(t)
	alerts := rules(t)
	if len(alerts) < 5 {
		t.Errorf("found the alerts %v only", alerts)
	}
	for name, expr := range alerts {
		wantSeries(t, name, expr, exist)
	}
	recorded := []map[string]string{}
	for i, expr := range testnet.Dashboard(t, filepath.Join(deploy, "grafana-dashboard.json")) {
		wantSeries(t, "dashboard: "+expr, expr, exist)
		recorded = append(recorded, map[string]string{"record": fmt.Sprintf("query:%d", i), "expr": expr})
	}
	for _, args := range [][]string{
		{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"},
		{"check", "config", "prometheus.yml"},
	} {
		if out, content := testnet.Promtool(t, deploy, "", args...); !content {
			t.Errorf("promtool %v: %s", args, out)
		}
	}
	// The dashboard's queries are written as recording rules, because promtool parses only rules.
	text, err := json.Marshal(
		map[string]any{"groups": []map[string]any{{"name": "dashboard", "rules": recorded}}})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "dashboard.yml"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, content := testnet.Promtool(t, dir, "", "check", "rules", "dashboard.yml"); !content {
		t.Errorf("the dashboard's queries: %s", out)
	}
	tests := testnet.ReadFile(t, filepath.Join(deploy, "alerts_test.yml"))
	for name := range alerts {
		if !strings.Contains(string(tests), "alertname: "+name+"\n        exp_alerts:") {
			t.Errorf("no test has %s fire", name)
		}
	}
}

// panels returns the queries of the dashboard's panels, with the titles of the panels as keys, and the
// queries of the dashboard's variables. In the queries of panels, variables are replaced by values.
func panels(t *testing.T) (queries map[string][]string, variables []string) {
	t.Helper()
	text := testnet.ReadFile(t, filepath.Join(deploy, "grafana-dashboard.json"))
	var file struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Definition string }
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	fill := strings.NewReplacer("$job", ".*", "$instance", ".*", "$__rate_interval", "1m").Replace
	queries = make(map[string][]string)
	for _, p := range file.Panels {
		for _, target := range p.Targets {
			queries[p.Title] = append(queries[p.Title], fill(target.Expr))
		}
	}
	values := regexp.MustCompile(`^label_values\((.*), \w+\)$`)
	for _, v := range file.Templating.List {
		if m := values.FindStringSubmatch(v.Definition); m != nil {
			variables = append(variables, fill(m[1]))
		}
	}
	return queries, variables
}

// Prometheus scrapes each rank instead of the launcher. All panels of the dashboard show data, except for the
// panels that deploy/README.md lists.
func TestDashboardOfRanks(t *testing.T) {
	var targets []string
	for r := range 2 {
		s := full()
		s.Rank = r
		if r > 0 {
			s = other()
		}
		server := httptest.NewServer(metrics.Handler(func() trace.Stats { return s }))
		t.Cleanup(server.Close)
		targets = append(targets, fmt.Sprintf("{targets: ['%s'], labels: {rank: '%d', host: h}}",
			server.Listener.Addr(), r))
	}
	prom := testnet.StartPrometheus(t,
		"global: {scrape_interval: 1s}\nscrape_configs: [{job_name: gohvd, static_configs: ["+
			strings.Join(targets, ", ")+"]}]\n", nil)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	query := func(expr string) []testnet.Sample {
		samples, err := prom.Query(expr)
		if err != nil {
			t.Fatal(err)
		}
		return samples
	}
	testnet.Eventually(t, "Prometheus has two scrapes of both", func() bool {
		return len(query("count_over_time(hvd_world_size[1m]) > 1")) == 2
	})
	readme := testnet.ReadFile(t, filepath.Join(deploy, "README.md"))
	queries, variables := panels(t)
	if len(variables) != 2 {
		t.Errorf("got variables %v, want job and instance", variables)
	}
	for _, v := range variables {
		if len(query(v)) != 2 {
			t.Errorf("there is nothing to choose for %s", v)
		}
	}
	without := 0
	for title, all := range queries {
		empty := 0
		for _, expr := range all {
			if len(query(expr)) == 0 {
				empty++
			}
		}
		if told := strings.Contains(string(readme), `"`+title+`"`) && title != "Ranks" &&
			title != "Running for"; told != (empty > 0) {
			t.Errorf("%s: %d of %v are empty, and the README says so: %v", title, empty, all, told)
		}
		without += empty
	}
	if without != 3 {
		t.Errorf("%d queries are empty, want 3", without)
	}
	for _, c := range []struct {
		title string
		value float64
	}{{"Ranks", 2}, {"Time in exchanges", 0}} {
		samples := query(queries[c.title][0])
		if len(samples) == 0 || samples[0].Value != c.value {
			t.Errorf("%s: got %v, want %g", c.title, samples, c.value)
		}
	}
}

// All labels in the legends of the dashboard and in the texts of the alerts exist.
func TestTemplates(t *testing.T) {
	known := map[string]bool{}
	for _, labels := range series(t) {
		for _, l := range labels {
			known[l] = true
		}
	}
	found := 0
	for file, template := range map[string]*regexp.Regexp{
		"grafana-dashboard.json": regexp.MustCompile(`\{\{(\w+)\}\}`),
		"alerts.yml":             regexp.MustCompile(`\$labels\.(\w+)`),
	} {
		text := testnet.ReadFile(t, filepath.Join(deploy, file))
		for _, m := range template.FindAllStringSubmatch(string(text), -1) {
			found++
			if !known[m[1]] {
				t.Errorf("%s: no metric has a label %s", file, m[1])
			}
		}
	}
	if found < 10 {
		t.Errorf("found %d templates only", found)
	}
}

// docs/metrics.md lists exactly the metrics that exist, with the type, labels and help text of each.
func TestPage(t *testing.T) {
	text := testnet.ReadFile(t, page)
	listed := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "| `hvd_") {
			name, _, _ := strings.Cut(strings.TrimPrefix(line, "| `"), "`")
			listed[name] = strings.TrimSpace(line)
		}
	}
	all := families(t)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		f := all[name]
		if !strings.HasPrefix(name, "hvd_") {
			continue
		}
		var labels []string
		for _, l := range labelsOf(f) {
			// Only these two metrics have the labels rank and host by themselves. The launcher adds both
			// labels to all other metrics, and the page does not list them there.
			if own := name == "hvd_up" || name == "hvd_rank_info"; own || l != "rank" && l != "host" {
				labels = append(labels, "`"+l+"`")
			}
		}
		want := fmt.Sprintf("| `%s` | %s | %s | %s |", name, strings.ToLower(f.GetType().String()),
			strings.Join(labels, ", "), f.GetHelp())
		if listed[name] != want {
			t.Errorf("docs/metrics.md has\n%s\nwant\n%s", listed[name], want)
		}
		delete(listed, name)
	}
	for name := range listed {
		t.Errorf("docs/metrics.md has %s, which does not exist", name)
	}
}
