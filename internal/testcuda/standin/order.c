// The part of the stand-in for libcudart that checks the order of accesses to device memory. cudart.c includes
// this file. Two accesses of the same bytes, of which one writes, must be in one stream, or events or waits of
// the host must put one before the other. The check does not depend on when the work runs: it compares vector
// clocks when work is enqueued. Waits of any thread of the host count for all its threads, and an event that
// is shared with other processes puts all earlier work of this process before what waits for it.
//
// With STANDIN_CUDA_UNORDERED=1 nothing is checked.

// access is an access to bytes from begin up to end of a block.
struct access {
	size_t begin, end;
	int slot, writes;
	long number;
	const char *call;
};

static struct clock enqueued; // all work so far
static struct clock hostKnows; // the work whose end the host has seen

static void merge(struct clock *c, const struct clock *with) {
	for (int i = 0; i < slots; i++)
		if (c->at[i] < with->at[i])
			c->at[i] = with->at[i];
}

static int takeSlot(void) {
	for (int i = 0; i < slots; i++)
		if (!slotTaken[i]) {
			slotTaken[i] = 1;
			return i;
		}
	standin_violation("there are more than %d streams", slots);
}

// checkAccess records an access after everything in c. The caller holds the lock.
static void checkAccess(struct block *b, struct access a, const struct clock *c) {
	int kept = 0;
	for (int i = 0; i < b->numAccesses; i++) {
		struct access *o = &b->accesses[i];
		if (o->begin < a.end && a.begin < o->end && (o->writes || a.writes) && o->number > c->at[o->slot])
			standin_violation("%s: it uses bytes %zu to %zu of the allocation at %p, which %s on another stream %s, and "
				"nothing puts it before or after", a.call, a.begin, a.end, (void *)b->address, o->call,
				o->writes ? "writes" : "reads");
		if (o->slot == a.slot && o->begin >= a.begin && o->end <= a.end && a.writes >= o->writes)
			continue; // the new access is after it, and stands for it
		b->accesses[kept++] = *o;
	}
	if (kept == maxAccesses) { // forget the oldest one
		memmove(b->accesses, b->accesses + 1, --kept * sizeof *b->accesses);
	}
	b->accesses = realloc(b->accesses, (size_t)(kept + 1) * sizeof *b->accesses);
	b->accesses[kept] = a;
	b->numAccesses = kept + 1;
}

void standin_access(void *stream, const void *p, size_t n, int writes, const char *call) {
	if (n == 0 || standin_setting("STANDIN_CUDA_UNORDERED", 0))
		return;
	struct stream *s = checked(stream, call);
	pthread_mutex_lock(&lock);
	struct block *b = find(p);
	if (b) {
		merge(&s->clock, &hostKnows);
		long number = ++enqueued.at[s->slot];
		s->clock.at[s->slot] = number;
		size_t begin = (size_t)((const char *)p - b->address);
		checkAccess(b, (struct access){begin, begin + n, s->slot, writes, number, call}, &s->clock);
	}
	pthread_mutex_unlock(&lock);
}

// hostSees records that the host has seen the end of all work in c.
static void hostSees(const struct clock *c) {
	pthread_mutex_lock(&lock);
	merge(&hostKnows, c);
	pthread_mutex_unlock(&lock);
}
