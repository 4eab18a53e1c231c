import sys
sys.path.insert(0,"/work/b/page/tests"); sys.path.insert(0,"/tmp/page")
from browser import chromium
from pathlib import Path
import re
src=Path("/tmp/page/heads9216.html").read_text()
import hashlib,base64
def variant(css):
    style=re.search(r"<style>(.*?)</style>",src,re.S)[1]
    new=style+css
    h=lambda t:"'sha256-"+base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()+"'"
    return src.replace(h(style),h(new)).replace(style,new)
OBS=open("/tmp/page/bench.py").read().split('OBS="""')[1].split('"""')[0]
cases={"base":"","cv-thumb":".thumbnail{content-visibility:auto;contain-intrinsic-size:auto 5rem auto 7rem}","cv-layer":".layer{content-visibility:auto;contain-intrinsic-size:auto 8000px auto 8rem}","both":".layer{content-visibility:auto;contain-intrinsic-size:auto 8000px auto 8rem}.thumbnail{content-visibility:auto;contain-intrinsic-size:auto 5rem auto 7rem}"}
with chromium() as b:
    for n in sys.argv[1:]:
        p=Path(f"/tmp/page/v.html"); p.write_text(variant(cases[n]))
        page=b.new_page(viewport={"width":1280,"height":860}); page.set_default_timeout(120000)
        page.goto(p.as_uri()); page.wait_for_selector(".thumbnail"); page.evaluate(OBS); page.wait_for_timeout(1500)
        def rep(name):
            page.wait_for_timeout(500)
            r=page.evaluate("() => [Math.max(0,...long), long.reduce((a,b)=>a+b,0), Math.max(...frames), frames.length]")
            print(n,name,[round(x) for x in r],flush=True); page.evaluate("()=>{long.length=0;frames.length=0}")
        rep("load")
        for _ in range(10): page.mouse.move(600,500); page.mouse.wheel(0,400); page.wait_for_timeout(30)
        rep("scroll")
        for k in range(10): page.mouse.move(300+k*40,300+k*20); page.wait_for_timeout(16)
        rep("hover")
        page.close()
