package rank

import (
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/testnet"
)

// A process that was a rank does not wait for ever for the next roster.
func TestRosterThatDoesNotCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := testnet.Context(t)
		me := elastic.Member{Slot: elastic.Slot{Host: "h"}, Number: 1}
		m := &Membership{me: me, joined: 1, news: make(chan struct{}),
			newest: &elastic.Roster{Generation: 1, Members: []elastic.Member{me}}}
		cfg := config.Config{ElasticTimeout: 2 * time.Second, StartTimeout: time.Second}
		began := time.Now()
		err := new(Rank).startMember(ctx, cfg, &Options{Member: &m, Log: zap.NewNop()})
		if waited := time.Since(began); err == nil || waited != 3*time.Second {
			t.Errorf("got error %v after %v, want one after 3 s", err, waited)
		}
	})
}
