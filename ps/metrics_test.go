package ps

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestMetrics checks that each node serves its counters at HVD_METRICS_ADDR until Finalize.
func TestMetrics(t *testing.T) {
	const pushes = 20
	value := func(text, name string) int {
		m := regexp.MustCompile("(?m)^" + regexp.QuoteMeta(name) + ` (\S+)$`).FindStringSubmatch(text)
		if m == nil {
			t.Errorf("there is no %s in\n%s", name, text)
			return -1
		}
		f, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Error(err)
		}
		return int(f)
	}
	j := job{t: t, servers: 1, workers: 1, settings: map[string]string{"HVD_METRICS_ADDR": ":0"}}
	j.run(func(po *Node) {
		role := strings.Split(po.van.Stats().Name, " ")[0]
		switch {
		case po.Role() == Server:
			if err := server(po, 0, Sum[float32]()); err != nil {
				t.Error(err)
				return
			}
		case po.Role() == Worker:
			w := must(NewKVWorker[float32](po))
			for range pushes {
				noError(t, w.Push(t.Context(), []uint64{1}, make([]float32, 1000)))
			}
		}
		if err := po.Barrier(t.Context(), AllGroup); err != nil {
			t.Error(err)
			return
		}
		text := must(testnet.Get(t.Context(), "http://"+po.metrics.Addr()+"/metrics"))
		name := role + " 0"
		if po.Role() == Scheduler {
			name = role
		}
		value(text, fmt.Sprintf("hvd_ps_node_info{node=%q}", name))
		requests, bytes, peer := 0, "received", "worker 0"
		if po.Role() == Worker {
			requests, bytes, peer = pushes, "sent", "server 0"
		}
		if po.Role() == Scheduler {
			return
		}
		count := fmt.Sprintf("hvd_ps_request_duration_seconds_count{kind=%q,role=%q}", "push", role)
		if got := value(text, count); got != pushes {
			t.Errorf("%s: %d pushes, want %d", name, got, pushes)
		}
		if got := value(text, fmt.Sprintf("hvd_ps_requests_total{peer=%q}", peer)); got != requests {
			t.Errorf("%s: %d requests, want %d", name, got, requests)
		}
		if got := value(text, fmt.Sprintf("hvd_ps_waiting_requests{peer=%q}", peer)); got != 0 {
			t.Errorf("%s: %d requests wait", name, got)
		}
		got, least := value(text, fmt.Sprintf("hvd_ps_%s_bytes_total{peer=%q}", bytes, peer)), pushes*4000
		if got < least || got > 2*least {
			t.Errorf("%s: %d bytes %s, want somewhat more than %d", name, got, bytes, least)
		}
	})
}

// TestMetricsAddr checks that a node does not try to connect if its address for metrics cannot be one.
func TestMetricsAddr(t *testing.T) {
	for _, c := range []struct{ role, addr, want string }{
		{"scheduler", "here", "here"},
		{"server", ":65536", "65536"},
		{"server", ":65533", "65533 + 3 = 65536"},
		{"worker", ":65530", "65530 + 6 = 65536"},
	} {
		_, err := Join(t.Context(), Config{Settings: map[string]string{"DMLC_ROLE": c.role, "DMLC_RANK": "2",
			"DMLC_NUM_SERVER": "3", "DMLC_NUM_WORKER": "3", "DMLC_PS_ROOT_URI": "127.0.0.1",
			"DMLC_PS_ROOT_PORT": strconv.Itoa(testnet.FreePort(t)), "HVD_METRICS_ADDR": c.addr,
			"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}})
		testnet.WantError(t, err, "HVD_METRICS_ADDR", c.want)
	}
}
