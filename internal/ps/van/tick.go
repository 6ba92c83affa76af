package van

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
)

// Dead returns the ids of the nodes that have died, or from which no message came for the time timeout: at
// the scheduler of all workers and servers, at other nodes that of the scheduler and those that the scheduler
// has declared dead. A node that has sent nothing yet is silent since it has connected. If timeout is 0, Dead
// returns nil.
func (v *Van) Dead(timeout time.Duration) (dead []int) {
	if timeout <= 0 {
		return nil
	}
	gone := v.members.goneErrors()
	for id, err := range gone {
		if err != ErrLeft {
			dead = append(dead, id)
		}
	}
	for id, l := range *v.links.Load() {
		if l.silent() > timeout && gone[id] == nil && l.conn != nil && (v.sched != nil || id == SchedulerID) {
			dead = append(dead, id)
		}
	}
	slices.Sort(dead)
	return dead
}

// tick does what time requires until the van is stopped: heartbeats, resending, and noticing silent nodes.
func (v *Van) tick() {
	ticker := time.NewTicker(v.timing.interval())
	defer ticker.Stop()
	var beaten, checked time.Duration
	ticked := v.timing.now()
	for {
		select {
		case now := <-ticker.C:
			if late := v.timing.stopped(ticked); late > 0 {
				v.excuse(late)
			}
			ticked = v.timing.now()
			check := v.timing.now()-checked >= dial.CheckPeriod(v.cfg.HeartbeatTimeout)
			if check {
				checked = v.timing.now()
			}
			if v.timing.beats() {
				beat := v.timing.now()-beaten >= v.cfg.HeartbeatInterval
				if beat {
					beaten = v.timing.now()
				}
				v.heartbeat(beat)
			}
			for id, l := range *v.links.Load() {
				if v.cfg.Resend && l.conn != nil {
					l.resend(now)
				}
				// The goroutine that reads may be in a handler that takes long.
				if lazy, held := l.lazy.Swap(false), l.held.Swap(false); lazy || held {
					l.notify()
				}
				if check && id == l.peer {
					l.checkSilence(now)
				}
			}
			v.handler.Tick(now)
		case <-v.ctx.Done():
			return
		}
	}
}

// heartbeat ends links that have been silent for too long and, if beat is set, sends a heartbeat to the
// scheduler. The scheduler answers heartbeats. While it handles a message of a node, which may take long, it
// reads none, so it sends heartbeats to the node unasked.
func (v *Van) heartbeat(beat bool) {
	for id, l := range *v.links.Load() {
		if l.conn == nil || v.sched == nil && id != SchedulerID {
			continue
		}
		if beat && (v.sched == nil || l.handling.Load()) {
			l.heartbeat()
		}
		silent := l.silent()
		if silent <= v.cfg.HeartbeatTimeout {
			continue
		}
		err := &silenceError{silent, v.cfg.HeartbeatTimeout}
		if v.sched != nil {
			v.sched.declareDead(l, err)
		} else {
			// The scheduler may live: it declares this node dead if the network between the two has failed.
			l.abort(fmt.Errorf("%w: it has failed, or the network between it and %s has", err, Name(v.ID())))
		}
	}
}

// excuse makes a time not count in which this process has read nothing. It may have read messages since, so
// that less time than that counts.
func (v *Van) excuse(t time.Duration) {
	for id, l := range *v.links.Load() {
		if id == l.peer {
			l.excused.Add(int64(min(t, l.silent())))
		}
	}
}
