package view

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/timeline/report"
)

// exportedData returns the data of an exported page, by the addresses of the answers.
func exportedData(t *testing.T, source Source, given ...string) map[string]string {
	t.Helper()
	var page bytes.Buffer
	if err := Export(&page, source, given...); err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(page.String(), `id="exported">`)
	text, _, ends := strings.Cut(rest, "</script>")
	all := make(map[string]string)
	if err := json.Unmarshal([]byte(text), &all); err != nil || !found || !ends {
		t.Fatalf("the page has no data: %v", err)
	}
	for key, packed := range all {
		z, err := gzip.NewReader(base64.NewDecoder(base64.StdEncoding, strings.NewReader(packed)))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		all[key] = string(body)
	}
	return all
}

// An exported page has no command line, no settings and no paths.
func TestExportedPageIsAnonymous(t *testing.T) {
	v := straggler.read(t)
	v.Title = "/home/my secret project/t.json secret/u.json /a secret//b secret/runs/ my run/"
	v.report.Job = report.About{Command: []string{"secret"}, Settings: map[string]string{"A": "secret"},
		Hosts: []string{"node0"}}
	v.report.Problems = []string{"a file is left out: open /home/my secret project/t.json: permission denied",
		"open /a secret/b secret/runs/v.json", "open my run/w.json"}
	all := exportedData(t, v, "secret/u.json", "/home/my secret project/t.json", "/a secret//b secret/runs/", "my run/")
	for key, body := range all {
		if strings.Contains(body, "secret") {
			t.Errorf("%s has a secret: %.300q", key, body)
		}
	}
	for key, want := range map[string]string{"info": `"title":"t.json u.json runs/ my run/"`,
		"report": `"a file is left out: open t.json: permission denied","open v.json","open w.json"`} {
		if !strings.Contains(all[key], want) {
			t.Errorf("%s: got %.300q, want %s", key, all[key], want)
		}
	}
	if v.report.Job.Command == nil || !strings.Contains(v.report.Problems[0], "/home") {
		t.Errorf("the export has changed the report: %+v, %q", v.report.Job, v.report.Problems)
	}
}
