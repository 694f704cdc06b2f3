/* lock_journal.pml -- the lock, the undo journal, and recovery after a death inside.
 *
 *   step here            function in native/
 *   acquire              core/lock.c lock_acquire; the kernel's robust futex is at `dead:`
 *   recover, rollback    core/lock.c recover, core/journal.c tx_rollback
 *   tx_set               core/journal.h undo_push and the TX_SETTERs, one store a step
 *   commit               core/journal.c tx_commit, publish_events, seq_even
 *   release              core/lock.c lock_release
 *   reader               readers without the lock: shmc_namespace_at, core/snapshot.c, events
 *
 * One operation sets A and B alike, A twice, and writes one event. Each store is a step; at each step
 * the process may die instead (DEATHS in all, in recovery too) or stop for ever (STOPS).
 * Shown: one owner; whoever gets the lock finds the state before or after each operation, and each
 * committed one; readers see no mixed state and no phantom or vanishing event; everybody ends.
 * BUG_* are faults that must be found. Journal records are written in one step: nothing reads above count.
 */
#ifndef PROCS
#define PROCS 3
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef STOPS
#define STOPS 1
#endif
#define NOBODY 255
#define A 0
#define B 1
#define HEAD 2

byte owner = NOBODY;            /* the futex word */
bool owner_died;                /* FUTEX_OWNER_DIED in it */
byte field[3];                  /* logged */
byte count;                     /* the journal */
byte rec_field[4], rec_old[4];
byte seq, published;            /* atomic, unlogged */

byte committed, inside, deaths, stops, ended;    /* not in the segment: what really happened */

/* One instruction; or the process ends, or never goes on, just before it. */
#define STEP(x) atomic { if :: x :: deaths < DEATHS -> deaths++; goto dead :: stops < STOPS -> stops++; goto stopped fi }

inline tx_set(f, v) {
#ifdef BUG_STORE_BEFORE_COUNT
    STEP(rec_field[count] = f; rec_old[count] = field[f]);
    STEP(field[f] = v);
    STEP(count++)
#else
#ifdef BUG_COUNT_BEFORE_RECORD
    STEP(count++);
    STEP(rec_field[count - 1] = f; rec_old[count - 1] = field[f]);
#else
#ifndef BUG_NO_JOURNAL
    STEP(rec_field[count] = f; rec_old[count] = field[f]);
    STEP(count++);
#endif
#endif
    STEP(field[f] = v)
#endif
}

inline seq_even() { STEP(seq = (seq | 1) + 1) }

inline rollback() {
#ifdef BUG_CLEAR_BEFORE_RESTORE
    STEP(n = count; count = 0);
#else
    n = count;
#endif
#ifdef BUG_OLDEST_FIRST
    i = 0;
    do
    :: i < n -> STEP(field[rec_field[i]] = rec_old[i]); i++
    :: else -> break
    od;
#else
    do
    :: n > 0 -> n--; STEP(field[rec_field[n]] = rec_old[n])
    :: else -> break
    od;
#endif
    STEP(count = 0);
    STEP(published = field[HEAD]);
    seq_even()
}

active [PROCS] proctype process() {
    byte n, i;
    bool eownerdead;

    /* A deadline may end the wait whenever another has the lock. */
    atomic {
        if
        :: owner == NOBODY -> owner = _pid; eownerdead = owner_died; owner_died = false
#ifdef BUG_STEAL
        :: owner != NOBODY -> owner = _pid; inside--
#else
        :: owner != NOBODY -> goto done
#endif
        fi;
        inside++;
        assert(inside == 1)
    }
#ifndef BUG_NO_RECOVERY
    if
    :: eownerdead -> rollback(); STEP(eownerdead = false)       /* pthread_mutex_consistent */
    :: else
    fi;
#endif
    atomic {
        assert(count == 0 && !(seq & 1));
        assert(field[A] == committed && field[B] == committed);
        assert(field[HEAD] == committed && published == committed)
    };

#ifndef BUG_SEQ_STAYS_EVEN
    STEP(seq = seq | 1);
#endif
    tx_set(A, 100);
    tx_set(B, committed + 1);
    tx_set(A, committed + 1);
    tx_set(HEAD, committed + 1);
#ifdef BUG_PUBLISH_BEFORE_COMMIT
    STEP(published = field[HEAD]);
    STEP(count = 0; committed++);
#else
    STEP(count = 0; committed++);       /* the commit is this one store */
    STEP(published = field[HEAD]);
#endif
    seq_even();
    STEP(owner = NOBODY; inside--);
    goto done;

dead:   /* the kernel walks the robust list; the pid is not gone by that */
    atomic {
        if
#ifndef BUG_PLAIN_MUTEX
        :: owner == _pid -> owner = NOBODY; owner_died = true; inside--
#endif
        :: else
        fi
    };
    goto done;
stopped:
    ended++;
end_stopped:
    false;
done:
    atomic { ended++; assert(ended < PROCS || stops || owner == NOBODY) }      /* nobody waits for the dead */
}

/* Two looks, each consistent where the sequence word says so; what was read as published stays. */
active proctype reader() {
    byte s, a, b, p, looks;
    do
    :: looks < 2 ->
        looks++;
        s = seq;
        a = field[A];
        b = field[B];
        atomic { if :: seq == s && !(s & 1) -> assert(a == b) :: else fi; a = 0; b = 0; s = 0 };
        atomic { assert(published >= p && published <= committed); p = published }
    :: else -> break
    od
}
