package sidecar

import (
	"bytes"
	"encoding/binary"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/ps"
)

func startNode(settings map[string]string) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_StartNode{
		StartNode: &sidecarpb.StartNode{Settings: settings}}}
}

func exchange(x *sidecarpb.Exchange) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Exchange{Exchange: x}}
}

func serveApp(handler string, parameters ...float64) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Serve{Serve: &sidecarpb.Serve{
		Dtype: uint32(tensor.Float32), Handler: handler, Parameters: parameters}}}
}

func finalizeNode() *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Finalize{Finalize: &sidecarpb.Finalize{Barrier: true}}}
}

// TestNode checks pushes and pulls through shared memory, and that invalid requests are refused with an error
// and change nothing.
func TestNode(t *testing.T) {
	port := strconv.Itoa(testnet.FreePort(t))
	roles := []string{"scheduler", "server", "worker"}
	clients := make([]*client, len(roles))
	for i := range clients {
		clients[i] = connect(t, server(t, Config{}))
	}
	place := func(offset, numBytes uint64) *sidecarpb.Memory {
		return &sidecarpb.Memory{Arena: 1, Offset: offset, Bytes: numBytes}
	}
	all(clients, func(i int, c *client) {
		refused := func(q *sidecarpb.Request, want string) {
			t.Helper()
			e := c.Call(q).GetError()
			if e.GetClass() != classUsage || !strings.Contains(e.GetText(), want) {
				t.Errorf("%s: got error %v, want one of class 1 with %q", roles[i], e, want)
			}
		}
		refused(exchange(&sidecarpb.Exchange{Push: true}), "has started no node")
		refused(serveApp("sum"), "has started no node")
		node := c.Must(startNode(map[string]string{"DMLC_ROLE": roles[i], "DMLC_NUM_SERVER": "1",
			"DMLC_NUM_WORKER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port})).GetNode()
		if node.GetRole() != roles[i] || node.GetNumServers() != 1 || node.GetNumWorkers() != 1 {
			t.Errorf("%s: got the place %v", roles[i], node)
		}
		refused(startNode(nil), "has started a node already")
		switch roles[i] {
		case "server":
			refused(serveApp("adagrad", 1), `got the handler "adagrad" with 1 parameters`)
			refused(serveApp("average"), "want [adagrad adam assign momentum sgd sum]")
			c.Must(serveApp("sum"))
		case "worker":
			b := c.Arena(1, 4096)
			binary.LittleEndian.PutUint64(b, 5)
			binary.LittleEndian.PutUint64(b[8:], 6)
			for k := range 4 {
				binary.LittleEndian.PutUint32(b[64+4*k:], math.Float32bits(float32(k)))
			}
			f32 := uint32(tensor.Float32)
			c.Must(exchange(&sidecarpb.Exchange{Dtype: f32, Keys: place(0, 16), Push: true,
				Values: place(64, 16)}))
			c.Must(exchange(&sidecarpb.Exchange{Dtype: f32, Keys: place(0, 16), Push: true,
				Values: place(64, 16), Pull: true, Results: place(128, 16)}))
			if got := tensor.View[float32](b[128:144]); !slices.Equal(got, []float32{0, 2, 4, 6}) {
				t.Errorf("pulled %v, want [0 2 4 6]", got)
			}
			for want, x := range map[string]*sidecarpb.Exchange{
				"neither a push nor a pull": {Dtype: f32, Keys: place(0, 16)},
				"no memory for the pulled":  {Dtype: f32, Keys: place(0, 16), Pull: true},
				"18 bytes of values":        {Dtype: f32, Keys: place(0, 16), Push: true, Values: place(64, 18)},
				"element type 77":           {Dtype: 77, Keys: place(0, 16), Pull: true},
				"want a multiple of 8":      {Dtype: f32, Keys: place(4, 16), Pull: true, Results: place(64, 16)},
				"only 4096 bytes":           {Dtype: f32, Keys: place(0, 16), Pull: true, Results: place(4096, 16)},
			} {
				refused(exchange(x), want)
			}
			r := c.Call(exchange(&sidecarpb.Exchange{Dtype: f32, Keys: place(0, 16), Pull: true,
				Results: place(128, 12)}))
			if !strings.Contains(r.GetError().GetText(), "the keys have 4 values") {
				t.Errorf("got %v, want an error about the number of values", r)
			}
		}
		c.Must(finalizeNode())
		c.bye()
	})
	testnet.Eventually(t, "the end of the nodes' goroutines, while the sidecars live", func() bool {
		stacks := make([]byte, 1<<20)
		return !bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("(*node).run"))
	})
}

// TestNodeFails checks that a failure ends a Finalize that waits for the other nodes, that these learn the
// reason, and that requests before the failure get the error of the node.
func TestNodeFails(t *testing.T) {
	for _, finalizes := range []bool{true, false} {
		port := strconv.Itoa(testnet.FreePort(t))
		servers := []*Server{server(t, Config{}), server(t, Config{})}
		clients := []*client{connect(t, servers[0]), connect(t, servers[1])}
		all(clients, func(i int, c *client) {
			c.Must(startNode(map[string]string{"DMLC_ROLE": []string{"scheduler", "server"}[i],
				"DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "0", "DMLC_PS_ROOT_URI": "127.0.0.1",
				"DMLC_PS_ROOT_PORT": port}))
		})
		scheduler, failing := clients[0], clients[1]
		var other, mine uint64
		servers[1].mu.Lock()
		memory := &servers[1].client.memory
		servers[1].mu.Unlock()
		if finalizes {
			mine = failing.Send(finalizeNode())
			for app, text := int32(0), ""; !strings.Contains(text, "has been finalized"); app++ {
				q := serveApp("sum")
				q.GetServe().App = app
				text = failing.Call(q).GetError().GetText()
			}
		} else {
			other = scheduler.Send(finalizeNode())
			memory.mu.Lock() // the exchange waits for it, and the barrier for the exchange
			failing.Send(exchange(new(sidecarpb.Exchange)))
			mine = failing.Send(&sidecarpb.Request{What: &sidecarpb.Request_NodeBarrier{
				NodeBarrier: &sidecarpb.NodeBarrier{Group: int32(ps.ServerGroup)}}})
		}
		failure := failing.Send(&sidecarpb.Request{What: &sidecarpb.Request_Finalize{
			Finalize: &sidecarpb.Finalize{Failure: "its file is damaged"}}})
		if finalizes {
			failing.Reply(failure)
			other = scheduler.Send(finalizeNode())
		}
		if got := scheduler.Reply(other).GetError().GetText(); !strings.Contains(got, "its file is damaged") {
			t.Errorf("the scheduler: got %q, want the reason", got)
		}
		if !finalizes {
			memory.mu.Unlock()
			failing.Reply(failure)
		}
		if e := failing.Reply(mine).GetError(); e == nil || strings.Contains(e.GetText(), "has started no node") {
			t.Errorf("a request before the failure: got %v, want the error of the node", e)
		}
		scheduler.bye()
		failing.bye()
	}
}

// TestNodeOfADeadClient checks that the sidecar fails if a client ends whose node is in a job.
func TestNodeOfADeadClient(t *testing.T) {
	s := server(t, Config{})
	c := connect(t, s)
	c.Must(startNode(map[string]string{"DMLC_ROLE": "scheduler", "DMLC_NUM_SERVER": "0", "DMLC_NUM_WORKER": "0",
		"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": strconv.Itoa(testnet.FreePort(t))}))
	c.Bye()
	<-s.Dead()
	if err := c.end(); err != nil {
		t.Error(err)
	}
	testnet.WantError(t, s.Death(), "client process", "sent Bye before Shutdown")
}
