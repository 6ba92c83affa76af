package testnet

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// maxAnswer is the largest number of bytes that the method get reads from an answer.
const maxAnswer = 16 << 20

// prometheusProgram returns the path of a program in Debian's package prometheus. If the program is missing,
// it skips the test. In CI, which has the program, it fails the test instead.
func prometheusProgram(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		const needs = "it is in Debian's package prometheus"
		if os.Getenv("CI") != "" {
			t.Fatalf("%v; %s", err, needs)
		}
		t.Skipf("%v; %s", err, needs)
	}
	return path
}

// Promtool runs promtool in the directory dir with the given arguments and with input as its standard input.
// It returns promtool's output. The result content is true if the exit status was 0.
func Promtool(t testing.TB, dir, input string, args ...string) (output string, content bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, prometheusProgram(t, "promtool"), args...)
	cmd.Dir, cmd.Stdin = dir, strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if _, ended := err.(*exec.ExitError); err != nil && !ended {
		t.Fatal(err)
	}
	return string(out), err == nil
}

// Prometheus is a running Prometheus server.
type Prometheus struct {
	t    testing.TB
	base string // the beginning of the server's URLs
}

// StartPrometheus starts a Prometheus server with the configuration config and the further arguments args.
// files are other files in the configuration's directory, by name. The server is killed when the test ends.
func StartPrometheus(t testing.TB, config string, files map[string]string, args ...string) *Prometheus {
	t.Helper()
	path := prometheusProgram(t, "prometheus")
	dir := t.TempDir()
	write := func(name, text string) string {
		at := filepath.Join(dir, name)
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return at
	}
	for name, text := range files {
		write(name, text)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, path, append([]string{
		"--config.file=" + write("prometheus.yml", config), "--storage.tsdb.path=" +
			filepath.Join(dir, "data"),
		"--web.listen-address=127.0.0.1:0",
	}, args...)...)
	var log bytes.Buffer
	pipe, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// The server logs the address on which it listens.
	found, done := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(done)
		for buf := make([]byte, 4096); ; {
			n, err := pipe.Read(buf)
			log.Write(buf[:n])
			if addr := listening(log.String()); addr != "" {
				select {
				case found <- addr:
				default:
				}
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		_ = cmd.Wait() // fails because the server was killed
		if t.Failed() {
			t.Logf("prometheus:\n%s", log.String())
		}
	})
	select {
	case addr := <-found:
		return &Prometheus{t, "http://" + addr}
	case <-done:
		t.Fatal("prometheus has ended before it was ready")
	case <-time.After(timeout):
		t.Fatalf("prometheus has not logged that it is ready within %v", timeout)
	}
	return nil
}

// listening returns the server's address from its log. If the server is not ready yet, it returns "".
func listening(log string) string {
	// The two lines may be logged in either order.
	ready := strings.Contains(log, `msg="Server is ready to receive web requests."`)
	_, rest, _ := strings.Cut(log, `msg="Listening on" address=`)
	addr, _, whole := strings.Cut(rest, "\n")
	addr, _, _ = strings.Cut(addr, " ")
	if !ready || !whole {
		return ""
	}
	return addr
}

// Sample is a value of a time series, with the labels of the series. The label __name__ is the name of the
// series.
type Sample struct {
	Labels map[string]string
	Value  float64
}

// Query evaluates a PromQL expression at the present time. If the expression is wrong or the server fails, it
// returns an error.
func (s *Prometheus) Query(expression string) ([]Sample, error) {
	var answer struct {
		Data struct {
			Result []struct {
				Metric map[string]string `json:"metric"`
				Value  [2]any            `json:"value"`
			} `json:"result"`
		} `json:"data"`
	}
	if err := s.get("/api/v1/query?query="+url.QueryEscape(expression), &answer); err != nil {
		return nil, err
	}
	var all []Sample
	for _, r := range answer.Data.Result {
		text, _ := r.Value[1].(string)
		value, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, fmt.Errorf("prometheus: query %q: value %v: %w", expression, r.Value, err)
		}
		all = append(all, Sample{r.Metric, value})
	}
	return all, nil
}

// Target is an endpoint that the server scrapes.
type Target struct {
	Health    string `json:"health"`
	LastError string `json:"lastError"`
}

// Targets returns the targets that the server scrapes.
func (s *Prometheus) Targets() ([]Target, error) {
	var answer struct {
		Data struct {
			Active []Target `json:"activeTargets"`
		} `json:"data"`
	}
	err := s.get("/api/v1/targets", &answer)
	return answer.Data.Active, err
}

// get fetches a path from the server and decodes the JSON answer. It stores the decoded value in *to.
func (s *Prometheus) get(path string, to any) error {
	ctx, cancel := context.WithTimeout(s.t.Context(), timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("prometheus: %s: %s: %.500s", path, resp.Status, body)
	}
	return json.Unmarshal(body, to)
}

// Dashboard returns the queries of the Grafana dashboard in the file path, with values in place of its
// variables. If there are no queries, it fails the test.
func Dashboard(t testing.TB, path string) []string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var dashboard any
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	var all []string
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, e := range v {
				walk(e)
			}
		case map[string]any:
			for key, e := range v {
				if text, ok := e.(string); ok && key == "expr" {
					all = append(all, strings.NewReplacer("$job", ".*", "$instance", ".*", "$__rate_interval",
						"1m").Replace(text))
				}
				walk(e)
			}
		}
	}
	if walk(dashboard); len(all) == 0 {
		t.Fatalf("%s has no queries", path)
	}
	return all
}
